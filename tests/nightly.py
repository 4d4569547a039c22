"""Everything that CI runs, the slow tests, and the planted bugs; counts and times as a table in `benchmarks/`.

python -m tests.nightly                               what `make nightly` does
python -m tests.nightly --only slow                   one stage: ci, slow or planted; more than one may be named
python -m tests.nightly tests/parity --only slow      the slow tests of these paths
python -m tests.nightly --only slow --sample 100      so many of the slow tests, drawn by chance

Every stage runs, whatever the ones before found. Exit code 1 when one fails.
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
STAGES = ("ci", "slow", "planted")


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    passed: int
    failed: int
    left_out: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests of a night.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="where the slow tests stand")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="of three stages")
    parser.add_argument("--sample", type=int, help="so many of the slow tests, drawn by chance")
    arguments = parser.parse_args()
    started = time.monotonic()
    lines: list[Line] = []
    for stage in arguments.only:
        lines += _slow_tests(arguments.paths, arguments.sample) if stage == "slow" else [_program(stage)]
    table = report(lines, time.monotonic() - started)
    print(table)
    print(store("nightly", table))
    return 1 if any(line.failed for line in lines) else 0


def _program(stage: str) -> Line:
    """A stage that tells its own details, and here only whether all was well."""
    command = ["bash", "scripts/test.sh"] if stage == "ci" else [sys.executable, "-m", "tests.mutants", "--store"]
    what = "everything that CI runs" if stage == "ci" else "every planted bug is noticed"
    started = time.monotonic()
    failed = subprocess.run(command, cwd=ROOT).returncode != 0
    return Line(what, passed=int(not failed), failed=int(failed), left_out=0, seconds=time.monotonic() - started)


def _slow_tests(paths: Sequence[str], sample: int | None) -> list[Line]:
    """A line per group of tests; with `sample` of so many of them, always the same ones."""
    names = _slow_names(paths)
    chosen = names if sample is None else random.Random(0).sample(names, min(sample, len(names)))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "slow.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "--durations=10", f"--junitxml={result}"]
        subprocess.run([*command, *chosen], cwd=ROOT, env=_environment())
        ran = list(xml.parse(result).getroot().iter("testcase")) if result.exists() else []
    return list(slow_lines(names, ran))


def slow_lines(names: Sequence[str], ran: Sequence[xml.Element]) -> Iterator[Line]:
    """One line per test function: of the tests `names`, those that ran, as pytest's report has them."""
    groups = dict.fromkeys(_group(name.split("::")[-1]) for name in names)
    for group in groups:
        cases = [case for case in ran if _group(case.get("name", "")) == group]
        bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        total = sum(_group(name.split("::")[-1]) == group for name in names)
        seconds = sum(float(case.get("time", 0)) for case in cases)
        yield Line(_sentence(group), len(cases) - len(bad), len(bad), total - len(cases), seconds)


def report(lines: Sequence[Line], seconds: float) -> str:
    """A table in Markdown."""
    rows = [f"| {line.what} | {line.passed} | {line.failed} | {line.left_out} | {line.seconds:.0f} |" for line in lines]
    head = ["| tests | passed | failed | left out | s |", "|---|---|---|---|---|"]
    command = f"`python -m tests.nightly {' '.join(sys.argv[1:])}`".replace(" `", "`")
    return "\n".join(["# The tests of a night", "", f"{command}: {seconds:.0f} s.", "", *head, *rows]) + "\n"


def _slow_names(paths: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "--collect-only", *paths]
    listed = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"{listed.stdout[-2000:]}\nthe slow tests cannot be collected")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def _group(name: str) -> str:
    """The test function, without the case."""
    return name.split("[")[0]


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _environment() -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
