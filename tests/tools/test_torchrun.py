"""tools/torchrun.py."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.ranks import REPOSITORY, child_environment

RANK = 'import os; os.environ["RANK"] == "1" and {}; __import__("time").sleep(60)'


def exit_code(rank_1: str) -> int:
    """Exit code of torchrun if rank 1 of 2 runs this expression immediately, and rank 0 sleeps."""
    command = [sys.executable, str(REPOSITORY / "tools" / "torchrun.py"), "--standalone", "--nproc-per-node", "2"]
    command += ["--no-python", sys.executable, "-c", RANK.format(rank_1)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=100)
    assert "FAILED" in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.parametrize(
    ("fault", "code"),
    [("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL), pytest.param("os._exit(2)", 2, marks=pytest.mark.slow)],
)
def test_exit_code_of_the_first_failed_rank_is_kept(fault: str, code: int) -> None:
    """A rank may be killed before it has written a report; restarts depend on it."""
    assert exit_code(fault) == code
