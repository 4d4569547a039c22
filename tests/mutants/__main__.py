"""Applies each mutant in its own process and checks that the tests selected for it fail.

python -m tests.mutants                    all mutants, two at a time
python -m tests.mutants norm bias          mutants whose name contains one of these words
python -m tests.mutants --store            also writes the table to benchmarks/

Exit code 1 if a mutant survives or its tests cannot be collected.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.reports import store
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutants import Mutant

ROOT = Path(__file__).parent.parent.parent
NUM_WORKERS = 2
TIMEOUT_S = 600
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[^\n]*?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """Outcome of the tests that were run with one mutant."""

    mutant: Mutant
    outcome: str
    """"killed" if a test failed, "survived" if none did, otherwise the reason why the tests did not run."""
    seconds: float
    first_failure: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests detect semantic errors?")
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these words")
    parser.add_argument("--store", action="store_true", help="write the table to benchmarks/")
    arguments = parser.parse_args()
    words = arguments.words or [""]
    mutants = [each for each in MUTANTS.values() if any(word in each.name for word in words)]
    started = time.monotonic()
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        results = list(pool.map(run, mutants))
    table = report(results, time.monotonic() - started)
    print(table)
    if arguments.store:
        print(store("mutants", table))
    return 0 if mutants and all(result.outcome == "killed" for result in results) else 1


def run(mutant: Mutant) -> Result:
    """Runs the tests of a mutant in a separate process."""
    options = ["-x", "-q", "--tb=no", "-p", "tests.mutants.plugin", "-m", "not gpu1 and not gpu2 and not gpu4"]
    command = [sys.executable, "-m", "pytest", *options, *mutant.tests]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MUTANT": mutant.name}
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Result(mutant, f"still running after {TIMEOUT_S} s", TIMEOUT_S)
    failed = FAILED.search(done.stdout)
    outcome = {0: "survived", 1: "killed"}.get(done.returncode)
    if outcome is None:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        outcome = f"pytest ended with {done.returncode}: {' '.join(last)}"
    result = Result(mutant, outcome, time.monotonic() - started, failed[1] if failed else "")
    print(f"{result.outcome:>8} {result.seconds:6.1f} s  {mutant.name}", file=sys.stderr, flush=True)
    return result


def report(results: Sequence[Result], seconds: float) -> str:
    """Formats the results as a Markdown table."""
    killed = sum(result.outcome == "killed" for result in results)
    lines = [
        "# Mutants",
        "",
        f"`python -m tests.mutants`: {killed} of {len(results)} killed, {seconds:.0f} s with {NUM_WORKERS} workers.",
        "",
        "| mutant | target | outcome | s | first failure |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        name, failure = each.mutant.name.replace("_", " "), each.first_failure.removeprefix("tests/")
        lines.append(f"| {name} | `{each.mutant.target}` | {each.outcome} | {each.seconds:.0f} | `{failure}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
