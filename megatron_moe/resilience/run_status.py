"""status.json: how a run stands and why it ended, whatever the launcher makes of its exit code.

torchrun turns every non-zero code into 1, so job scripts read this file. Each rank that fails leaves a file of its own
in `crash/`; the earliest one that did not merely follow another rank is named as the first. Which was the earliest, and
which is of an earlier start, the times of those files tell: one clock stamps them all, that of the folder's server,
while the clocks of hosts differ, and are set while a run goes on.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_moe.config.exit_codes import (
    ExitCode,
    OtherRankProblem,
    Preempted,
    RunError,
)

State = Literal["starting", "running", "saving", "finished", "preempted", "failed"]

STATUS = "status.json"
STARTED = ".started"
"""Touched by every rank when it starts: tells a start that was killed early from a command line that was refused."""
_START_SECONDS = 10.0
"""Within this time all ranks of a start begin. A failure this recent may be another rank's of the same start."""
_SECONDS_BETWEEN_WRITES = 5.0
_SLOWEST_SECONDS = 1.0
"""How much earlier than this rank another one may have begun, and failed."""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """The content of status.json."""

    state: State = "starting"
    iteration: int = 0
    last_checkpoint: int | None = None
    """Iteration of the last committed checkpoint."""
    phase: str = ""
    rank: int | None = None
    """The first rank that failed."""
    host: str | None = None
    code: int | None = None
    sentence: str = ""
    hint: str = ""
    time: float = 0.0
    """Seconds since the epoch, of this report, by the clock of the host."""


@dataclass(frozen=True)
class Failure:
    """What a rank has left in crash/."""

    rank: int
    report: StatusReport
    time: float
    """Of the file: seconds since the epoch."""

    @property
    def followed(self) -> bool:
        """Another rank ended first, and this one saw it."""
        return self.report.code == ExitCode.OTHER_RANK


class RunStatus:
    """Writes status.json into the run folder. Nothing here ever raises into training.

    The first rank writes while all is well; a rank that fails writes at once. Without a run folder nothing is written.

    Args:
        say: gets one sentence when the file cannot be written.
        clock: seconds since the epoch.
        timer: seconds; nobody sets it.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        rank: int = 0,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._say = say
        self._clock = clock
        self._timer = timer
        self._started = timer()
        self._written: float | None = None
        self._said = False
        self._failed: Path | None = None
        """What this rank has left in crash/."""
        self.report = StatusReport(time=clock())
        if not self._others_failed() and rank == 0:
            self._write(STATUS, self.report)

    def __enter__(self) -> "RunStatus":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Writes how the run ended; what was raised goes on."""
        if error is None:
            self.finish("finished", ExitCode.OK, self.report.sentence)
        elif isinstance(error, Preempted):
            self.finish("preempted", error.code, str(error))
        elif isinstance(error, OtherRankProblem):
            self.fail(error.code, str(error), first=error.rank)
        elif isinstance(error, RunError):
            self.fail(error.code, str(error))
        elif isinstance(error, KeyboardInterrupt):
            self.fail(ExitCode.INTERRUPTED, str(error) or "interrupted from the keyboard")
        else:
            self.fail(ExitCode.BUG, f"{type(error).__name__}: {error}", "a fault of the program: please report it")

    def update(self, *, state: State | None = None, **fields: Any) -> None:
        """Changes fields of the report. Written on every change of state, else at most every 5 seconds.

        A run that has failed stays failed.
        """
        if self.report.state == "failed":
            return
        changed = state is not None and state != self.report.state
        if state is not None:
            fields["state"] = state
        self.report = replace(self.report, **fields, time=self._clock())
        due = self._written is None or changed or self._timer() - self._written >= _SECONDS_BETWEEN_WRITES
        if self._rank == 0 and due:
            self._write(STATUS, self.report)

    def starting(self, *, say: Callable[[str], None]) -> None:
        """The ranks have met, so that a failure of an earlier start may be overwritten. `say`: from now on gets the
        sentence when the file cannot be written."""
        self._say = say
        self.update(state="starting")

    def finish(self, state: Literal["finished", "preempted"], code: ExitCode, sentence: str = "") -> None:
        """The run ends as it should, or by a signal."""
        self.update(state=state, code=int(code), sentence=sentence)
        if self._rank == 0:
            self._write(STATUS, self.report)

    def fail(self, code: ExitCode, sentence: str, hint: str = "", *, first: int | None = None) -> None:
        """This rank ends. Names the earliest failure of all ranks in status.json.

        `first`: the rank that failed first, where this one only follows it.
        """
        self.report = replace(
            self.report,
            state="failed",
            rank=self._rank if first is None else first,
            host=socket.gethostname() if first is None else None,
            code=int(code),
            sentence=sentence,
            hint=hint,
            time=self._clock(),
        )
        self._failed = self._write(f"crash/rank_{self._rank:05d}.json", self.report)
        failures = self.failures() or [Failure(self._rank, self.report, 0.0)]
        known = [each.report.last_checkpoint for each in failures if each.report.last_checkpoint is not None]
        # the first rank may have completed one after the others had left
        newest = max(known) if known else None
        self._write(STATUS, replace(min(failures, key=_blame).report, last_checkpoint=newest))

    def failures(self) -> list[Failure]:
        """What ranks of this start have left in crash/. This one must have failed: the others' files are judged by the
        time of its own, and without it there are none. Files that cannot be read do not count."""
        found: list[Failure] = []
        if self._failed is None:
            return found
        with suppress(OSError):  # somebody has removed the folder
            begun = self._failed.stat().st_mtime - (self._timer() - self._started) - _SLOWEST_SECONDS
            for path in sorted(self._failed.parent.glob("rank_*.json")):
                failure = _read(path)
                if failure is not None and failure.time >= begun:
                    found.append(failure)
        return found

    def _others_failed(self) -> bool:
        """Touches STARTED. True if another rank of this start has failed already, whose report must stay."""
        if self._run_dir is None:
            return False
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            started, status = self._run_dir / STARTED, self._run_dir / STATUS
            started.touch()
            recent = started.stat().st_mtime - status.stat().st_mtime < _START_SECONDS
            return recent and json.loads(status.read_text())["state"] == "failed"
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def _write(self, name: str, report: StatusReport) -> Path | None:
        """Written aside and put in place in one step, so that a reader never sees half of it. None: it could not be."""
        if self._run_dir is None:
            return None
        self._written = self._timer()
        path = self._run_dir / name
        aside = path.with_name(f".{path.name}-{self._rank}-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(asdict(report), indent=1) + "\n")
            os.replace(aside, path)
            return path
        except OSError as error:
            if not self._said:
                self._say(f"cannot write {path}: {error.strerror}; training goes on without it")
            self._said = True
            return None


def _read(path: Path) -> Failure | None:
    try:
        report = StatusReport(**json.loads(path.read_text()))
        rank = int(path.stem.removeprefix("rank_"))
        return None if report.code is None else Failure(rank, report, path.stat().st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def _blame(failure: Failure) -> tuple[bool, float]:
    """Ranks that failed by themselves come before those that followed; of the former the earliest, of the latter the
    last one, which has seen the reports of the others."""
    return (failure.followed, -failure.time if failure.followed else failure.time)
