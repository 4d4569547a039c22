"""Plants one bug after the other in a copy of the tree, and expects the tests chosen for it to fail.

python -m tests.mutants                    all of them, two at a time
python -m tests.mutants padding bias       those whose name has one of these words in it
python -m tests.mutants --store            also writes the table to benchmarks/

Exit code 1 when a bug stays unnoticed, does not apply any more, or keeps the tests from being collected.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.helpers.reports import store
from tests.mutants.bug import Bug, DoesNotApply
from tests.mutants.bugs import BUGS

ROOT = Path(__file__).parent.parent.parent
COPIED = ("arguments", "megatron_moe", "scripts", "tests", "tools", "pretrain_moe.py", "pyproject.toml", "setup.py")
NUM_WORKERS = 2
TIMEOUT_SECONDS = 300
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[^\n]*?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What the tests said about one bug."""

    bug: Bug
    outcome: str
    """red: noticed. green: not noticed. Anything else says why there is no answer."""
    seconds: float
    first: str = ""
    """The first test that failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests notice planted bugs?")
    parser.add_argument("words", nargs="*", help="only bugs whose name has one of these words in it")
    parser.add_argument("--store", action="store_true", help="write the table to benchmarks/")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if not arguments.words or any(word in bug.name for word in arguments.words)]
    started = time.monotonic()
    verdicts = list(run_all(bugs))
    table = report(verdicts, time.monotonic() - started)
    print(table)
    if arguments.store:
        print(store("planted-bugs", table))
    return 0 if bugs and all(verdict.outcome == "red" for verdict in verdicts) else 1


def run_all(bugs: Sequence[Bug]) -> Iterator[Verdict]:
    """The verdicts in the order of the bugs; every worker has a copy of the tree for itself."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(NUM_WORKERS) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(NUM_WORKERS):
            trees.put(copy_tree(Path(folder) / str(number)))

        def work(bug: Bug) -> Verdict:
            tree = trees.get()
            try:
                verdict = run(bug, tree)
            finally:
                trees.put(tree)
            print(f"{verdict.outcome:>5} {verdict.seconds:6.1f} s  {bug.name}", file=sys.stderr, flush=True)
            return verdict

        yield from pool.map(work, bugs)


def copy_tree(folder: Path) -> Path:
    """What the tests need, without what earlier runs left."""
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(bug: Bug, tree: Path) -> Verdict:
    """Plants the bug in `tree`, runs its tests there, and takes it out again."""
    try:
        before = bug.plant(tree)
    except DoesNotApply as problem:
        return Verdict(bug, f"does not apply: {problem}", 0.0)
    started = time.monotonic()
    try:
        outcome, first = _outcome(bug, tree)
    finally:
        (tree / bug.file).write_text(before)
    return Verdict(bug, outcome, time.monotonic() - started, first)


def _outcome(bug: Bug, tree: Path) -> tuple[str, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *bug.select]
    # no compiled files: a patched file may have the size and the second of the one before
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT_SECONDS} s", ""
    outcomes = {0: "green", 1: "red"}
    failed = FAILED.search(done.stdout)
    if done.returncode not in outcomes:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return f"pytest ended with {done.returncode}: {' '.join(last)}", ""
    return outcomes[done.returncode], failed[1] if failed else ""


def report(verdicts: Sequence[Verdict], seconds: float) -> str:
    """A table in Markdown."""
    noticed = sum(verdict.outcome == "red" for verdict in verdicts)
    lines = [
        "# Planted bugs",
        "",
        "Each bug is a small change of one file; the tests chosen for it must turn red (`tests/mutants/`).",
        "",
        f"`python -m tests.mutants`: {noticed} of {len(verdicts)} noticed, {seconds:.0f} s with {NUM_WORKERS} workers.",
        "",
        "| bug | file | tests selected | outcome | s | first to fail |",
        "|---|---|---|---|---|---|",
    ]
    for each in verdicts:
        bug, selected = each.bug, ", ".join(_short(name) for name in each.bug.select)
        cells = (bug.name, _short(bug.file), selected, each.outcome, f"{each.seconds:.0f}", _short(each.first))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(path: str) -> str:
    return f"`{path.removeprefix('tests/').removeprefix('megatron_moe/')}`" if path else ""


if __name__ == "__main__":
    sys.exit(main())
