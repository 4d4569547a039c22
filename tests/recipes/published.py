"""Dry runs of every shipped recipe, published layout and public model, and proxy runs of the recipes."""

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments.errors import Finished, FlagErrors
from arguments.read import read_plan
from arguments.recipes import recipe_names
from tests.helpers.ranks import run_torchrun
from tests.helpers.zoo import command_line, zoo_rows

STARTS = "starts"
_FILE = Path(__file__).parent / "published.tsv"
_PARTS = Path(__file__).parents[2] / "scripts" / "recipes" / "parts"


@dataclass(frozen=True)
class Case:
    """A command line, without `--dry-run`."""

    source: str
    name: str
    words: tuple[str, ...]


def shipped() -> list[Case]:
    return [Case("scripts/recipes", name, ("--recipe", name)) for name in recipe_names()]


def published() -> Iterator[Case]:
    """Rows of published.tsv: layouts of the Model Zoo, Megatron-LM's dev branch and Megatron-Bridge, as flags over our
    model files. The pipeline layout is `auto` if the source gives none. --max-position-embeddings is at least the
    sequence length."""
    with _FILE.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            parts = [str(_PARTS / f"{part}.yaml") for part in ("pretrain", *row["parts"].split())]
            machine = ["--gpu", row["gpu"], "--world-size", row["gpus"]]
            yield Case(row["source"], row["recipe"], ("--config", *parts, *machine, *row["flags"].split()))


def models() -> list[Case]:
    """One rank of every public model whose layers this program has."""
    return [Case("tests/data_files/zoo_models.tsv", str(row), tuple(command_line(row))) for row in zoo_rows()]


def dry_run(case: Case) -> str:
    """Returns `STARTS`, or the first reason why the run would not start."""
    try:
        read_plan([*case.words, "--dry-run=json"], {}, vocab_size_of=lambda config: config.vocab_size or 512)
    except FlagErrors as error:
        return error.problems[0].what
    except Finished as finished:
        found = json.loads(finished.text)
        return STARTS if found["would_start"] else [*found["cannot_train_yet"], *found["missing_inputs"]][0]
    raise AssertionError("a dry run ends with a report")


def proxy(case: Case) -> str:
    """Returns `trains` if two CPU ranks complete two steps, else the last line of the output."""
    flags = [*case.words, *"--proxy --train-iters 2 --device cpu --no-progress-bar".split()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = run_torchrun(2, [*flags, "--run-dir", f"{folder}/run"], cwd=Path(folder))
        except subprocess.TimeoutExpired:
            return "still running at the time limit"
        metrics = Path(folder) / "run" / "metrics.jsonl"
        losses = metrics.read_text().count('"lm loss"') if metrics.exists() else 0
    if done.returncode == 0 and losses == 2:
        return "trains"
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return next((line.strip() for line in said if line.strip().startswith("1. ")), said[-1] if said else "no output")


def table(cases: Iterable[Case], trained: Sequence[str] = ()) -> str:
    """Markdown table of the dry runs of all cases and of the proxies of the recipes in `trained`."""
    rows, counts = [], Counter[tuple[str, bool]]()
    for case in cases:
        answer = dry_run(case)
        counts[case.source, answer == STARTS] += 1
        ran = proxy(case) if case.name in trained else ""
        rows.append(f"| {case.name.replace('|', '/')} | {answer.replace('|', '/')} | {ran} |")
        print(rows[-1], file=sys.stderr, flush=True)
    sources = dict.fromkeys(source for source, _ in counts)
    totals = [f"- {each}: {counts[each, True]} of {counts[each, True] + counts[each, False]} start" for each in sources]
    head = ["| recipe | dry run | two steps of the proxy on two CPU ranks |", "|---|---|---|"]
    return "\n".join(["# Recipes", "", "`make recipes`", "", *totals, "", *head, *rows]) + "\n"
