"""Host cost of a training step: the overlapped schedule calls few more functions than the plain one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 1.055
"""Maximum number of calls of the overlapped schedule relative to the plain one."""


@pytest.mark.slow
def test_the_overlapped_schedule_takes_little_more_host_time_than_the_plain_one() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks/harness/bench_host.py"), "--timed", "0"]
    # the interpreter would replace the launches whose host time is measured
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--functions", "5", "--cases", "layout-ep2", "layout-ep2-pairs"]
    found = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    rows = [line.split("|")[1:-1] for line in found.stdout.splitlines() if line.startswith("| layout")]
    plain, overlapped = (int(calls.replace(",", "")) for *_, calls, _ in rows)
    assert 1000 < plain < overlapped < MOST * plain, found.stdout
    assert "kernels/backends/triton/launcher.py" in found.stdout, found.stdout
