"""Hang watchdog: on timeout dumps all stacks and exits with `ExitCode.HANG`.

A thread reports phase, iteration and the collective in which the main thread waits, and ends the process. If C code
holds the GIL, the C timer of `faulthandler` prints the stacks to stderr some seconds later and exits with code 1.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.resilience.run_status import RunStatus

_PEER_STACKS_S = 2.0
"""Time to wait for the stacks of other ranks before naming ranks that have written none."""
_JOIN_S = 5.0
_POLL_S = 0.2
"""Interval of the calls of the function given to `Watchdog.monitor`."""
_STACKS = "stacks_{:05d}.txt"
_C_TIMER_DELAY_S = 10.0
"""Time from the deadline of the watchdog thread to the deadline of the C timer (`faulthandler`)."""


class Watchdog:
    """Limits the duration of each phase of a run; `__enter__` begins the phase "start".

    Args:
        seconds: time limit by phase; other phases are unlimited.
        run_dir: folder for `crash/stacks_NNNNN.txt`; None prints stacks to stderr.
        status: writer of status.json, which reports a timeout.
        exit_process: function that ends the process with the given exit code.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        run_dir: Path | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        status: RunStatus | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._seconds = seconds
        self._crash = None if run_dir is None else run_dir / "crash"
        self._rank = rank
        self._world_size = world_size
        self._exit_process = exit_process
        self._status = status
        self._main = threading.get_ident()
        self._started = time.monotonic()
        self._change = threading.Condition()
        self._phase, self._iteration = "start", 0
        self._begin = time.monotonic()
        self._deadline: float | None = None
        self._closed = False
        self._check: Callable[[], OtherRankProblem | None] | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__)  # on a crash in C code, prints the Python stacks
        if self._seconds:
            self.enter("start")
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join(_JOIN_S)

    def enter(self, phase: str, iteration: int = 0) -> None:
        """Begins a phase and restarts its time limit."""
        seconds = self._seconds.get(phase)
        with self._change:
            self._phase, self._iteration, self._begin = phase, iteration, time.monotonic()
            self._deadline = None if seconds is None else self._begin + seconds
            self._change.notify()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
        if seconds is not None and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + _C_TIMER_DELAY_S, exit=True, file=sys.__stderr__)

    def monitor(self, check: Callable[[], OtherRankProblem | None]) -> None:
        """Calls `check` every `_POLL_S` seconds and ends the process with the problem that it returns. The watchdog
        thread does this because the main thread is blocked if this rank waits on the device for another one."""
        with self._change:
            self._check = check
            self._change.notify()

    def _watch(self) -> None:
        problem = None
        with self._change:
            while not self._closed and problem is None:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                problem = None if self._check is None else self._check()
                if problem is None:
                    self._change.wait(left if self._check is None else min(_POLL_S, left or _POLL_S))
            if self._closed:
                return
        if problem is None:
            self._report_timeout()
        else:
            self._report_peer(problem)

    def _report_peer(self, problem: OtherRankProblem) -> None:
        at = f"iteration {self._iteration}: " if self._iteration else ""
        with suppress(OSError, ValueError):  # stderr may be closed
            print(f"rank {self._rank}: {at}{problem}", file=sys.stderr, flush=True)
        if self._status is not None:
            self._status.fail(problem.code, f"{at}{problem}", first=problem.rank)
        faulthandler.cancel_dump_traceback_later()
        self._exit_process(int(problem.code))

    def _report_timeout(self) -> None:
        stacks = self._write_stacks()
        frame = sys._current_frames().get(self._main)
        at = f", iteration {self._iteration}" if self._iteration else ""
        sentence = (
            f"rank {self._rank} made no progress for {time.monotonic() - self._begin:.0f} s: phase {self._phase}{at}"
            f"{waiting_in(frame) if frame else ''}; stacks are in {stacks}"
        )
        flag = "step" if self._phase == "evaluation" else self._phase
        hint = f"--{flag}-deadline sets this time limit"
        self._report(sentence, hint)
        missing = self._ranks_without_stacks()
        if missing:
            self._report(f"{sentence}; {missing} wrote no stacks: stopped, dead, or not hanging", hint)
        faulthandler.cancel_dump_traceback_later()
        self._exit_process(int(ExitCode.HANG))

    def _report(self, sentence: str, hint: str) -> None:
        with suppress(OSError, ValueError):  # stderr may be closed
            print(f"{sentence}; {hint}", file=sys.stderr, flush=True)
        if self._status is not None:
            self._status.fail(ExitCode.HANG, sentence, hint)

    def _write_stacks(self) -> str:
        try:
            if self._crash is None:
                raise OSError("no run folder")
            self._crash.mkdir(parents=True, exist_ok=True)
            path = self._crash / _STACKS.format(self._rank)
            with open(path, "w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            return str(path)
        except OSError:
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            return "stderr"

    def _ranks_without_stacks(self) -> str:
        """Names the ranks that have written no stacks since this launch."""
        if self._crash is None or self._world_size == 1:
            return ""
        time.sleep(_PEER_STACKS_S)
        own = _modified(self._crash / _STACKS.format(self._rank))
        # File times come from one clock, the file server's; the clocks of hosts differ and may be adjusted.
        begun = own - (time.monotonic() - self._started)
        missing = [rank for rank in range(self._world_size) if _modified(self._crash / _STACKS.format(rank)) < begun]
        return ", ".join(f"rank {rank}" for rank in missing)


def waiting_in(frame: FrameType) -> str:
    """Describes where a thread with this innermost frame waits: name, group and call site of the collective, or only
    the call site if it is not in a collective. The text starts with a comma."""
    collective, group = "", ""
    each: FrameType | None = frame
    while each is not None:
        module = each.f_globals.get("__name__", "")
        if module.startswith("torch.distributed") and not collective and each.f_code.co_name != "wrapper":
            collective = each.f_code.co_name
        elif module.startswith("megatron_moe"):
            found = each.f_locals.get("group")
            if isinstance(found, ProcessGroup) and not group:
                more = f", ... {found.size} in all" if found.size > 8 else ""
                group = f" over {found.name} (ranks {', '.join(map(str, found.ranks[:8]))}{more})"
            if module != "megatron_moe.parallel.collectives":
                what = f"in {collective}{group}, called " if collective else "in code "
                return f", waiting {what}from {module}.{each.f_code.co_name}, line {each.f_lineno}"
        each = each.f_back
    return f", waiting in {collective}{group}" if collective else ""


def _modified(path: Path) -> float:
    """Modification time in seconds since the epoch; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
