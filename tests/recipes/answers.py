"""Answers of all dry runs and proxies, appended to a file as they come, and their table."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments.errors import FlagErrors
from tests.recipes.published import STARTS, TRAINS, Case, dry_run, proxy, proxy_digest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one row of the table says; a line of the file."""

    source: str
    name: str
    commit: str
    dry_run: str
    proxy: str
    plan: str = ""
    """Digest of what the proxy runs; empty if its flags are rejected."""
    seconds: float = 0.0
    """Duration of the proxy; 0 if another row with the same plan has run."""


def answers(cases: Iterable[Case], path: Path, commit: str) -> Iterator[Answer]:
    """Answers of all cases, in order. Those in the file whose proxies train are kept; the others are appended."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    stored = [answer for answer in (Answer(**json.loads(line)) for line in lines) if answer.proxy == TRAINS]
    kept = {(answer.source, answer.name): answer for answer in stored}
    ran = {answer.plan: answer.proxy for answer in stored}
    for case in cases:
        answer = kept.get((case.source, case.name)) or _answer(case, ran, commit)
        if answer.plan:
            ran[answer.plan] = answer.proxy
        if (case.source, case.name) not in kept:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(answer)) + "\n")
        yield answer


def _answer(case: Case, ran: dict[str, str], commit: str) -> Answer:
    """`ran`: answers of proxies by the digest of their plan."""
    row = Answer(source=case.source, name=case.name, commit=commit, dry_run=dry_run(case), proxy="")
    try:
        plan = proxy_digest(case)
    except FlagErrors as error:
        return Answer(**{**asdict(row), "proxy": error.problems[0].what})
    begun = time.monotonic()
    said = ran.get(plan) or proxy(case)
    seconds = 0.0 if plan in ran else round(time.monotonic() - begun, 1)
    return Answer(**{**asdict(row), "proxy": said, "plan": plan, "seconds": seconds})


def table(rows: Iterable[Answer]) -> str:
    """Markdown table with one row per answer, after the totals of every source."""
    rows = list(rows)
    totals, lines, first = [], [], dict[str, int]()
    for source in dict.fromkeys(row.source for row in rows):
        of_source = [row for row in rows if row.source == source]
        start, train = sum(row.dry_run == STARTS for row in of_source), sum(row.proxy == TRAINS for row in of_source)
        totals.append(f"- {source}: of {len(of_source)} rows {start} start, and the proxies of {train} train")
    for number, row in enumerate(rows, start=1):
        earlier = first.setdefault(row.plan, number) if row.plan else number
        trained = row.proxy if earlier == number else f"{row.proxy}, as row {earlier}"
        cells = [str(number), row.name, row.dry_run, trained]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    runs = [row.seconds for row in rows if row.seconds]
    about = (
        f"`make recipes` at commit {commits}. {len(runs)} proxies ran in {sum(runs) / 60:.0f} minutes; "
        '"as row N" means that the flags of both rows resolve to the same proxy, which ran once.'
    )
    head = ["| | recipe | dry run | two steps of the proxy on two CPU ranks |", "|---|---|---|---|"]
    return "\n".join(["# Recipes", "", about, "", *totals, "", *head, *lines]) + "\n"
