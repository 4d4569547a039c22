"""Runs the CI suite, the slow tests and the mutants; stores counts and times as a table in `benchmarks/`.

python -m tests.nightly                               all stages, as in `make nightly`
python -m tests.nightly --only slow                   one or more stages: ci, slow, mutants
python -m tests.nightly tests/parity --only slow      the slow tests of these paths
python -m tests.nightly --only slow --sample 100      a random sample of the slow tests

All stages run even if one fails, in which case the exit code is 1.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.reports import store

ROOT = Path(__file__).parent.parent
STAGES = ("ci", "slow", "mutants")


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    passed: int
    failed: int
    not_run: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Nightly tests.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="paths of the slow tests")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="stages to run")
    parser.add_argument("--sample", type=int, help="number of slow tests to draw at random")
    arguments = parser.parse_args()
    started = time.monotonic()
    lines: list[Line] = []
    for stage in arguments.only:
        lines += slow_tests(arguments.paths, arguments.sample) if stage == "slow" else [_program(stage)]
    table = report(lines, time.monotonic() - started)
    print(table)
    print(store("nightly", table))
    return 1 if any(line.failed for line in lines) else 0


def _program(stage: str) -> Line:
    """Runs a stage that prints its own details."""
    command = ["bash", "scripts/test.sh"] if stage == "ci" else [sys.executable, "-m", "tests.mutants", "--store"]
    what = "CI suite" if stage == "ci" else "all mutants are killed"
    started = time.monotonic()
    failed = subprocess.run(command, cwd=ROOT).returncode != 0
    return Line(what, passed=int(not failed), failed=int(failed), not_run=0, seconds=time.monotonic() - started)


def slow_tests(paths: Sequence[str], sample: int | None) -> list[Line]:
    """One line per test function; `sample` limits the run to a fixed random sample."""
    names = _slow_names(paths)
    chosen = names if sample is None else random.Random(0).sample(names, min(sample, len(names)))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "slow.xml"
        # cases are selected by name, because a sample drawn from these cases alone would differ from CI's sample of all
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "--durations=10"]
        subprocess.run([*command, f"--junitxml={result}", *chosen], cwd=ROOT, env=_environment())
        ran = list(xml.parse(result).getroot().iter("testcase")) if result.exists() else []
    return list(slow_lines(names, ran))


def slow_lines(names: Sequence[str], ran: Sequence[xml.Element]) -> Iterator[Line]:
    """One line per test function of `names`; `ran` are the test cases of the JUnit report."""
    groups = dict.fromkeys(_group(name.split("::")[-1]) for name in names)
    for group in groups:
        cases = [case for case in ran if _group(case.get("name", "")) == group]
        bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        total = sum(_group(name.split("::")[-1]) == group for name in names)
        seconds = sum(float(case.get("time", 0)) for case in cases)
        yield Line(_sentence(group), len(cases) - len(bad), len(bad), total - len(cases), seconds)


def report(lines: Sequence[Line], seconds: float) -> str:
    """Formats the lines as a Markdown table."""
    rows = [f"| {line.what} | {line.passed} | {line.failed} | {line.not_run} | {line.seconds:.0f} |" for line in lines]
    head = ["| tests | passed | failed | not run | s |", "|---|---|---|---|---|"]
    command = f"`python -m tests.nightly {' '.join(sys.argv[1:])}`".replace(" `", "`")
    return "\n".join(["# Nightly tests", "", f"{command}: {seconds:.0f} s.", "", *head, *rows]) + "\n"


def _slow_names(paths: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "--collect-only", *paths]
    listed = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"{listed.stdout[-2000:]}\nthe slow tests cannot be collected")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def _group(name: str) -> str:
    """Name of the test function, without parameters."""
    return name.split("[")[0]


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _environment() -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
