"""Supervision of a run: signal handlers, status.json, and the launcher watch, which ends a rank whose launcher died."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.text import counted
from megatron_moe.logs.run_lock import RUN_FOLDER, check_unlocked
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.resilience.signals import Signals

_PR_SET_PDEATHSIG = 1
"""Option of prctl (linux/prctl.h) that sets the signal sent to this process when its parent dies."""
_SIGNAL = signal.SIGURG
"""Signal that reports the parent's death. By default it is ignored, so it does not affect unrelated threads."""
_POLL_S = 1.0
_JOIN_S = 5.0
_SET_BY_TORCHRUN = b"TORCHELASTIC_RUN_ID="
"""Environment variable that torchrun sets for its ranks but that is not set in torchrun's own process."""


def with_launcher_identity(launch: ProcessInfo, parent: int | None) -> ProcessInfo:
    """Returns a copy with `parent` set; None selects the current parent process. If torchrun started all ranks,
    `start_id` also identifies the torchrun process, because its run id may be the same for every launch."""
    parent = os.getppid() if parent is None else parent
    launch = replace(launch, parent=parent)
    if launch.launcher != "torchrun" or not launch.supervised or launch.world_size != launch.local_world_size:
        return launch
    pid = _torchrun_process(parent)
    _, started = _parent_and_start(pid)
    return replace(launch, start_id=f"{launch.start_id}.{pid}.{started}")


class LauncherWatch:
    """Ends this rank with `ExitCode.LAUNCHER` when its parent process, a launcher, dies.

    A thread waits for Linux's parent-death signal and also compares the parent's process id every second. The signal
    alone is not enough: it is not sent if the parent dies before this process requests it, is also sent when only the
    parent's thread ends, and exists on Linux only. If C code holds the GIL, only the watchdog can end the process.

    Args:
        exit_process: function that ends the process with the given exit code.
    """

    def __init__(
        self, launch: ProcessInfo, status: RunStatus, *, exit_process: Callable[[int], None] = os._exit
    ) -> None:
        self._launch = launch
        self._status = status
        self._exit_process = exit_process
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launcher watch", daemon=True)
        self._has_signal = False

    def __enter__(self) -> "LauncherWatch":
        if self._launch.supervised:
            if self._launch.launcher == "torchrun" and not _has_torch(_torchrun_process(self._launch.parent)):
                self._exit("died before this rank began")
            # Threads that are started from here on inherit the signal mask, so the signal stays pending until `_watch`
            # accepts it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
            self._has_signal = _request_parent_death_signal(_SIGNAL)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._launch.supervised:
            return
        self._closed.set()
        if self._has_signal:
            _request_parent_death_signal(0)
            os.kill(os.getpid(), _SIGNAL)  # wakes the watching thread
        self._thread.join(_JOIN_S)

    def _watch(self) -> None:
        while not self._closed.is_set():
            if os.getppid() != self._launch.parent:
                self._exit(f"(process {self._launch.parent}) died")
                return
            if self._has_signal:
                signal.sigtimedwait({_SIGNAL}, _POLL_S)
            else:
                self._closed.wait(_POLL_S)

    def _exit(self, what: str) -> None:
        sentence = f"the launcher of rank {self._launch.rank} {what}"
        with suppress(OSError, ValueError):  # stderr may be a closed pipe to the launcher
            print(f"{sentence}; this rank ends as well", file=sys.stderr, flush=True)
        self._status.fail(ExitCode.LAUNCHER, sentence, "start the same command again; it continues from the checkpoint")
        self._exit_process(int(ExitCode.LAUNCHER))


def supervise(
    launch: ProcessInfo, run_dir: Path | None, exit_signals: Sequence[str], stack: ExitStack
) -> tuple[Signals, RunStatus]:
    """Starts signal handling, status.json and the launcher watch, in this order; `stack` ends them. Prints the first
    line of the run, as loading torch takes seconds.

    Must be called before anything that can fail. Raises EnvironmentProblem if another job writes into the run folder.
    """
    if launch.rank == 0:
        with suppress(OSError):  # the reader of a pipe may have exited
            where = f", run folder {run_dir}" if run_dir else ""
            print(f"starting on {counted(launch.world_size, 'rank')}{where}; loading torch", flush=True)
    has_launcher = launch.launcher != "none"
    signals = stack.enter_context(Signals(exit_signals, has_launcher=has_launcher, says=launch.rank == 0))
    if run_dir is not None:
        check_unlocked(run_dir, **RUN_FOLDER)
    status = stack.enter_context(RunStatus(run_dir, rank=launch.rank))
    stack.enter_context(LauncherWatch(launch, status))
    return signals, status


def _request_parent_death_signal(number: int) -> bool:
    """Makes the kernel send signal `number` when the parent dies; number 0 cancels the request. Returns True on
    success."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0)


def _torchrun_process(pid: int) -> int:
    """Process id of torchrun: the nearest of `pid` and its ancestors without torchrun's variables, because a script may
    have started the rank. If torchrun has died, returns the process that adopted its children."""
    with suppress(OSError):
        while pid > 1 and _SET_BY_TORCHRUN in Path(f"/proc/{pid}/environ").read_bytes():
            pid, _ = _parent_and_start(pid)
    return pid


def _parent_and_start(pid: int) -> tuple[int, str]:
    """Parent's process id, and start time in clock ticks since boot; (0, "") if the process is not known."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), fields[19]
    return 0, ""


def _has_torch(pid: int) -> bool:
    """True if the process has loaded torch, as torchrun does, or if its memory map cannot be read. Init, which usually
    adopts orphans, is an example of the latter."""
    try:
        return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    except PermissionError:
        return pid > 1
    except OSError:
        return Path(f"/proc/{pid}").exists() or not Path("/proc/self").exists()
