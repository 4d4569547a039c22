"""Locks of run and checkpoint folders."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.logs.run_lock import LOCK, RunLock, lock_holder
from tests.helpers.ranks import REPOSITORY

HOLD = """
import sys, time
from pathlib import Path
from megatron_moe.logs.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), does="writes into", option="--run-dir")
print("held", flush=True)
time.sleep(100)
"""


def lock(folder: Path) -> RunLock:
    return RunLock(folder, does="writes into", option="--run-dir")


def test_lock_of_a_killed_job_is_released(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentProblem, match=f"another job writes into {tmp_path}: process {job.pid} on "):
            lock(tmp_path)
        assert (lock_holder(tmp_path) or "").startswith(f"process {job.pid} on ")
        job.send_signal(signal.SIGKILL)
    assert lock_holder(tmp_path) is None
    lock(tmp_path).release()


def test_release_with_a_file_descriptor_open_in_a_child(tmp_path: Path) -> None:
    held = lock(tmp_path)
    copy = os.dup(held._file.fileno())  # like a forked process
    held.release()
    assert lock_holder(tmp_path) is None
    os.close(copy)


def test_lock_is_retried_while_another_process_reads_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).write_text("")
    with open(tmp_path / LOCK) as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            fcntl.flock(asking, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", pause)
        lock(tmp_path).release()
    assert len(pauses) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_unwritable_lock_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(held: RunLock) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RunLock, "_write_owner", refuse)
    with pytest.raises(EnvironmentProblem, match=f"{tmp_path / LOCK} cannot be written: {os.strerror(number)}"):
        lock(tmp_path)


def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert lock(tmp_path).warning is None
    monkeypatch.setattr(fcntl, "flock", unknown)
    held = lock(tmp_path)
    assert "without locks" in (held.warning or "") and lock_holder(tmp_path) is None
    held.release()
