"""Jobs beside each other: one per folder, by an advisory lock that the system frees when the process dies."""

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
"""Keywords of `RunLock` and `refuse_held` for run folders."""
_TRIES = 3
_PAUSE_SECONDS = 0.1
"""Between two tries: who asks for the holder (`held_by`) has a lock himself for a moment."""


class RunLock:
    """Holds a folder for this job until `release`, or the end of the process.

    Args:
        does: what the other job would do to the folder, such as "saves checkpoints to".
        option: the one that names another folder.

    Raises:
        EnvironmentProblem: another job holds the folder, or the lock file cannot be written.
    """

    def __init__(self, folder: Path, *, does: str, option: str) -> None:
        self._folder = folder
        self.works = True
        """False where the file system knows no locks."""
        try:
            self._file = open(folder / LOCK, "a+")
            self._take()
            self._sign()
        except BlockingIOError as error:
            holder = _holder(self._file.fileno())
            self._file.close()
            raise _refusal(folder, does, option, holder) from error
        except OSError as error:
            raise EnvironmentProblem(
                f"{folder / LOCK}, which keeps other jobs out, cannot be written: {error.strerror or error}; free it "
                f"or give another {option} folder"
            ) from error

    @property
    def warning(self) -> str | None:
        """A sentence for the log where the lock does not work."""
        where = f"{self._folder} is on a file system without locks"
        return None if self.works else f"{where}: a second job would not be noticed"

    def _take(self) -> None:
        """Raises BlockingIOError when somebody else has it."""
        for left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(_PAUSE_SECONDS)
            except OSError:
                self.works = False
                return

    def _sign(self) -> None:
        self._file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}))
        self._file.flush()

    def release(self) -> None:
        if self.works:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would not, if a forked process has the file
        self._file.close()


def refuse_held(folder: Path, *, does: str, option: str) -> None:
    """Raises EnvironmentProblem when another job holds the folder. For ranks that write there before this job locks
    it."""
    holder = held_by(folder)
    if holder is not None:
        raise _refusal(folder, does, option, holder)


def held_by(folder: Path) -> str | None:
    """Who holds the folder; None when nobody does, or nobody can know."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(file)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _refusal(folder: Path, does: str, option: str, holder: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"another job {does} {folder}: {holder}; stop it or give another {option} folder")


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "it did not sign the lock file"
