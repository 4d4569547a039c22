"""Ranks that are killed while they save: no half checkpoint is ever visible, and no run ever steps back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.killing import HARM, NUM_RANKS
from tests.helpers.ranks import REPOSITORY
from tests.helpers.reports import store


def kill(folder: Path, *, moments: int, chance: int) -> dict[str, int]:
    """Counts of what `tests.faults.killing` found."""
    command = [sys.executable, "-m", "tests.faults.killing", "--folder", str(folder)]
    command += ["--moments", str(moments), "--random", str(chance)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {key: found[key] for key in HARM} == dict.fromkeys(HARM, 0), found
    assert found["starts"] == moments + chance <= found["killed"], found
    return found


def test_p1_p2_kills_at_instrumented_points_and_by_chance_lose_no_committed_checkpoint(tmp_path: Path) -> None:
    """P1, P2; faults 1, 2, 3 and 6: four ranks, plain and background saves, a full disk on one of them now and then."""
    found = kill(tmp_path, moments=25, chance=10)
    assert min(found["committed"], found["disk_full"], found["swept"]) > 0, f"nothing was tried: {found}"


@pytest.mark.slow
def test_p1_p2_a_hundred_random_kills_over_four_ranks(tmp_path: Path) -> None:
    """The same for longer. The counts are stored."""
    found = kill(tmp_path, moments=60, chance=100)
    rows = "\n".join(f"| {name.replace('_', ' ')} | {count} |" for name, count in found.items())
    head = (
        f"# Ranks killed while they save\n\n{NUM_RANKS} ranks; 60 starts killed at the n-th touch of the file system, "
        f"100 at a random time; every second one saves in the background, every third save meets a full disk.\n\n"
    )
    store("kills", f"{head}| | |\n|---|---|\n{rows}\n")
