"""A short soak test; `make soak` runs the long one."""

import pytest

from tests.helpers.ranks import run_python


@pytest.mark.slow
def test_a_run_under_random_faults_ends_with_the_bits_of_an_undisturbed_one() -> None:
    """The faults are drawn with a fixed seed."""
    done = run_python("-m", "tests.soak", "--faults", "12", "--seed", "7", timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "bit for bit" in done.stdout
