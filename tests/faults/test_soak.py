"""A short soak; `make soak` is the long one."""

import os
import subprocess
import sys

import pytest

from tests.helpers.ranks import REPOSITORY


@pytest.mark.slow
def test_a_run_under_random_faults_ends_with_the_bits_of_an_undisturbed_one() -> None:
    """P1, P2, P3, P5; fault 1 and others, drawn by a fixed seed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tests.soak", "--faults", "12", "--seed", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "bit for bit" in done.stdout
