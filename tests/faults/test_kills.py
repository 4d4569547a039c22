"""Ranks killed during saves: no incomplete checkpoint is ever visible, and no run resumes from an older one."""

import json
from pathlib import Path

import pytest

from tests.faults.killing import HARM, NUM_RANKS
from tests.helpers.programs import run_script
from tests.helpers.ranks import REPOSITORY
from tests.helpers.reports import store


def kill(folder: Path, *, moments: int, chance: int) -> dict[str, int]:
    """Counts reported by `tests.faults.killing`."""
    starts = ("--moments", str(moments), "--random", str(chance))
    done = run_script(REPOSITORY / "tests" / "faults" / "killing.py", "--folder", folder, *starts, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {key: found[key] for key in HARM} == dict.fromkeys(HARM, 0), found
    assert found["starts"] == moments + chance <= found["killed"], found
    return found


def test_kills_at_instrumented_points_and_random_times_lose_no_committed_checkpoint(tmp_path: Path) -> None:
    """Four ranks save synchronously or asynchronously; sometimes the disk of one rank is full. The nightly test below
    has more moments."""
    found = kill(tmp_path, moments=15, chance=3)
    assert min(found["committed"], found["disk_full"], found["swept"]) > 0, f"nothing was tried: {found}"


@pytest.mark.slow
def test_a_hundred_random_kills_lose_no_committed_checkpoint(tmp_path: Path) -> None:
    """The nightly form of the test above, which stores its counts in benchmarks/."""
    found = kill(tmp_path, moments=60, chance=100)
    rows = "\n".join(f"| {name.replace('_', ' ')} | {count} |" for name, count in found.items())
    head = (
        f"# Ranks killed while they save\n\n{NUM_RANKS} ranks; 60 starts killed at the n-th file-system operation, "
        f"100 at a random time; every second one saves asynchronously, every third save meets a full disk.\n\n"
    )
    store("kills", f"{head}| | |\n|---|---|\n{rows}\n")
