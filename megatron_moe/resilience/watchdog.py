"""Deadlines: no rank waits for ever, and one that waits too long leaves its stacks behind.

Two rings. A thread knows phase, iteration and the collective that the main thread waits in; it writes the report and
ends the process with the code of a hang. Where C code holds the interpreter lock no thread can run: some seconds later
the C timer of `faulthandler` prints the stacks to stderr and ends the process with code 1.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.resilience.run_status import RunStatus

_OTHERS_SECONDS = 2.0
"""How long a rank waits for the stacks of others before it names those that left none."""
_GOODBYE_SECONDS = 5.0
"""How long the end of a run waits for the thread."""
_LOCKED_SECONDS = 10.0
"""How much later than the thread the C timer fires."""


class Watchdog:
    """Watches the phases of a run from `__enter__` on, which is the phase "start".

    Args:
        seconds: phase -> how long it may take; a phase without a deadline is not watched.
        run_dir: gets `crash/stacks_NNNNN.txt`; None: stacks go to stderr.
        leave: ends the process with a code.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        run_dir: Path | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._seconds = seconds
        self._crash = None if run_dir is None else run_dir / "crash"
        self._rank = rank
        self._world_size = world_size
        self._leave = leave
        self._status: RunStatus | None = None
        self._main = threading.get_ident()
        self._started = time.monotonic()
        self._change = threading.Condition()
        self._phase, self._iteration = "start", 0
        self._begin = time.monotonic()
        self._due: float | None = None
        self._closed = False
        self._then: list[Callable[[str, int], None]] = []
        self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)

    def __enter__(self) -> "Watchdog":
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__)  # a crash in C code prints the stacks of Python
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
            # or it would let go of what listeners hold while the interpreter ends: tensors then abort the process
            self._thread.join(_GOODBYE_SECONDS)

    def reports_to(self, status: RunStatus) -> None:
        """From now on an expired deadline is written into status.json."""
        self._status = status

    def then(self, call: Callable[[str, int], None]) -> None:
        """From now on called with every phase and iteration, as they are entered."""
        self._then.append(call)

    def enter(self, phase: str, iteration: int = 0) -> None:
        """The next phase begins, or the same one anew."""
        seconds = self._seconds.get(phase)
        with self._change:
            self._phase, self._iteration, self._begin = phase, iteration, time.monotonic()
            self._due = None if seconds is None else self._begin + seconds
            self._change.notify()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
        if seconds is not None and sys.__stderr__ is not None:
            later = seconds + _LOCKED_SECONDS
            faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__)
        for call in self._then:
            call(phase, iteration)

    def _watch(self) -> None:
        with self._change:
            while not self._closed:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._change.wait(left)
            if self._closed:
                return
        self._expired()

    def _expired(self) -> None:
        stacks = self._write_stacks()
        frame = sys._current_frames().get(self._main)
        at = f", iteration {self._iteration}" if self._iteration else ""
        sentence = (
            f"rank {self._rank} made no progress for {time.monotonic() - self._begin:.0f} s: phase {self._phase}{at}"
            f"{waiting_in(frame) if frame else ''}; stacks are in {stacks}"
        )
        flag = "step" if self._phase == "evaluation" else self._phase
        hint = f"--{flag}-deadline says how long that may take"
        self._tell(sentence, hint)
        silent = self._silent_ranks()
        if silent:
            self._tell(f"{sentence}; no stacks came from {silent}: stopped, dead, or not waiting", hint)
        faulthandler.cancel_dump_traceback_later()
        self._leave(int(ExitCode.HANG))

    def _tell(self, sentence: str, hint: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads stderr any more
            print(f"{sentence}; {hint}", file=sys.stderr, flush=True)
        if self._status is not None:
            self._status.fail(ExitCode.HANG, sentence, hint)

    def _write_stacks(self) -> str:
        try:
            if self._crash is None:
                raise OSError("no run folder")
            self._crash.mkdir(parents=True, exist_ok=True)
            path = self._crash / _stacks(self._rank)
            with open(path, "w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            return str(path)
        except OSError:
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            return "stderr"

    def _silent_ranks(self) -> str:
        """Ranks of this start that have written no stacks, though they had time."""
        if self._crash is None or self._world_size == 1:
            return ""
        time.sleep(_OTHERS_SECONDS)
        own = _written(self._crash / _stacks(self._rank))
        # one clock stamps all of these files; those of hosts differ, and are set while a run goes on
        begun = own - (time.monotonic() - self._started)
        silent = [rank for rank in range(self._world_size) if _written(self._crash / _stacks(rank)) < begun]
        return ", ".join(f"rank {rank}" for rank in silent)


def waiting_in(frame: FrameType) -> str:
    """The collective that a thread with this innermost frame waits in: its name, group and call; else the call alone.
    Begins with a comma."""
    collective, group = "", ""
    for each in _outwards(frame):
        module = each.f_globals.get("__name__", "")
        if module.startswith("torch.distributed") and not collective and each.f_code.co_name != "wrapper":
            collective = each.f_code.co_name
        elif module.startswith("megatron_moe"):
            found = each.f_locals.get("group")
            if isinstance(found, ProcessGroup) and not group:
                group = f" over {found.name} (ranks {', '.join(map(str, found.ranks[:8]))}{_more(found)})"
            if module != "megatron_moe.parallel.collectives":
                what = f"in {collective}{group}, called " if collective else "in code "
                return f", waiting {what}from {module}.{each.f_code.co_name}, line {each.f_lineno}"
    return f", waiting in {collective}{group}" if collective else ""


def _more(group: ProcessGroup) -> str:
    return f", ... {group.size} in all" if group.size > 8 else ""


def _outwards(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _written(path: Path) -> float:
    """Seconds since the epoch; 0 without a file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stacks(rank: int) -> str:
    return f"stacks_{rank:05d}.txt"
