"""File lock that allows only one job per run folder or checkpoint folder. The operating system releases it when the
process ends."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_moe.config.exit_codes import EnvironmentProblem

LOCK = ".lock"
RUN_FOLDER: Mapping[str, str] = MappingProxyType({"does": "writes into the run folder", "option": "--run-dir"})
"""Keyword arguments for `RunLock` and `check_unlocked` if the locked folder is a run folder."""
_TRIES = 3
_PAUSE_SECONDS = 0.1
"""Pause between attempts to acquire the lock. Retries are needed because `lock_holder` also locks the file briefly."""


class RunLock:
    """Exclusive lock on a folder until `release` or the end of the process.

    Args:
        does: verb phrase for the error message, such as "saves checkpoints to".
        option: command-line option that selects the folder, for the error message.

    Raises:
        EnvironmentProblem: another job holds the lock, or the lock file cannot be written.
    """

    def __init__(self, folder: Path, *, does: str, option: str) -> None:
        self._folder = folder
        self._works = True
        """False if the file system does not support locks."""
        try:
            self._file = open(folder / LOCK, "a+")
            self._acquire()
            self._write_owner()
        except BlockingIOError as error:
            with self._file:
                raise _refusal(folder, does, option, _holder(self._file.fileno())) from error
        except OSError as error:
            raise EnvironmentProblem(
                f"the lock file {folder / LOCK} cannot be written: {error.strerror or error}; fix its permissions or "
                f"give another {option} folder"
            ) from error

    @property
    def warning(self) -> str | None:
        """Warning text if the folder's file system does not support locks, else None."""
        if self._works:
            return None
        return f"{self._folder} is on a file system without locks: a second job would not be noticed"

    def _acquire(self) -> None:
        """Acquires the lock. Raises BlockingIOError if another process holds it during all attempts."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not tries_left:
                    raise
                time.sleep(_PAUSE_SECONDS)
            except OSError:
                self._works = False
                return

    def _write_owner(self) -> None:
        self._file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}))
        self._file.flush()

    def release(self) -> None:
        if self._works:
            # closing the file would not release the lock if a forked process has the file open
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def check_unlocked(folder: Path, *, does: str, option: str) -> None:
    """Raises EnvironmentProblem if another job has locked the folder. Takes the arguments of `RunLock`."""
    holder = lock_holder(folder)
    if holder is not None:
        raise _refusal(folder, does, option, holder)


def lock_holder(folder: Path) -> str | None:
    """Description of the job that has locked the folder; None if it is not locked or locks are unavailable."""
    try:
        with open(folder / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(file.fileno())
    except OSError:
        pass
    return None


def _refusal(folder: Path, does: str, option: str, holder: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"another job {does} {folder}: {holder}; stop it or give another {option} folder")


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "the lock file does not name its owner"
