"""status.json: state of a run, and the reason why the run ended.

Job scripts read status.json because torchrun replaces every non-zero exit code by 1. Each failing rank writes a
report to `crash/`; the earliest report that is not a consequence of another rank's failure names the first failure.
Reports are ordered, and distinguished from reports of earlier launches, by file modification time. All modification
times come from the file server's clock, whereas the clocks of hosts differ and may be adjusted during a run.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem, Preempted, RunError
from megatron_moe.data.files import open_atomically

State = Literal["starting", "running", "saving", "finished", "preempted", "failed"]

STATUS = "status.json"
STARTED = ".started"
"""File that every rank touches once its flags are valid. A launch that ends later without status.json was killed."""
_START_SECONDS = 10.0
"""Minimum age, when a rank starts, at which a failure in status.json is attributed to a previous launch and
overwritten."""
_SECONDS_BETWEEN_WRITES = 5.0
_START_SKEW_SECONDS = 1.0
"""Reports in crash/ are attributed to a previous launch if they were written more than this time before this rank
started."""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """Content of status.json."""

    state: State = "starting"
    iteration: int = 0
    last_checkpoint: int | None = None
    """Iteration of the last committed checkpoint; None if there is none."""
    phase: str = ""
    rank: int | None = None
    """Rank that failed first; None if none has failed, or if it is not known."""
    host: str | None = None
    code: int | None = None
    sentence: str = ""
    hint: str = ""
    warning: str = ""
    """Warning about the run (`RunPlan.warning`); empty if there is none."""
    time: float = 0.0
    """Time of this report by the host's clock, seconds since the epoch."""


@dataclass(frozen=True)
class Failure:
    """A failed rank's report in crash/."""

    rank: int
    report: StatusReport
    time: float
    """Modification time of the file, seconds since the epoch."""

    @property
    def is_consequence(self) -> bool:
        """True if the failure is a consequence of another rank's failure."""
        return self.report.code == ExitCode.OTHER_RANK


class RunStatus:
    """Writes status.json into the run folder; write errors never propagate.

    Rank 0 writes the file during normal operation, and any rank writes it on failure. No-op if `run_dir` is None.

    Args:
        say: called once, with an error message, if the file cannot be written.
        clock: seconds since the epoch.
        timer: monotonic clock, seconds.
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
        """Path of this rank's report in crash/; None if it has not failed."""
        earlier = self._earlier()
        self.report = StatusReport(
            time=clock(), last_checkpoint=earlier.last_checkpoint
        )  # until a checkpoint is loaded, there is none
        if not self._peer_failed(earlier) and rank == 0:
            self._write(STATUS, self.report)

    def __enter__(self) -> "RunStatus":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Writes how the run ended; the exception propagates."""
        if error is None:
            self.finish("finished", ExitCode.OK, self.report.sentence)
        elif isinstance(error, Preempted):
            self.finish("preempted", error.code, str(error))
        elif isinstance(error, RunError):
            self.fail(error.code, str(error), first=error.rank if isinstance(error, OtherRankProblem) else None)
        elif isinstance(error, KeyboardInterrupt):
            error.add_note(self._lost())
            self.fail(ExitCode.INTERRUPTED, str(error) or "interrupted from the keyboard", self._lost())
        else:
            self.fail(
                ExitCode.BUG, f"{type(error).__name__}: {error}", "this is a bug in the program; please report it"
            )

    def _lost(self) -> str:
        """Clause about the iterations that are lost if the run ends now, and how to continue."""
        iteration, saved = self.report.iteration, self.report.last_checkpoint
        if saved is None:
            return f"the last iteration was {iteration} and no checkpoint was saved, so the same command starts anew"
        return f"the last iteration was {iteration}; the same command continues from the checkpoint of {saved}"

    def update(self, *, state: State | None = None, **fields: Any) -> None:
        """Updates the report; writes it when the state changes, otherwise at most every 5 seconds. Has no effect
        after a failure."""
        if self.report.state == "failed":
            return
        state, before = state or self.report.state, self.report.state
        self.report = replace(self.report, **fields, state=state, time=self._clock())
        is_old = self._written is None or self._timer() - self._written >= _SECONDS_BETWEEN_WRITES
        due = state != before or is_old
        if self._rank == 0 and due:
            self._write(STATUS, self.report)

    def starting(self, *, say: Callable[[str], None], warning: str = "") -> None:
        """Called after the rendezvous. Writes the state "starting" to status.json, even if the file has a failure of a
        previous launch. `say`: replaces the constructor's `say`. `warning`: see `StatusReport.warning`."""
        self._say = say
        self.update(state="starting", warning=warning)

    def finish(self, state: Literal["finished", "preempted"], code: ExitCode, sentence: str = "") -> None:
        """Records a regular end or a preemption."""
        self.update(state=state, code=int(code), sentence=sentence)
        if self._rank == 0:
            self._write(STATUS, self.report)

    def fail(self, code: ExitCode, sentence: str, hint: str = "", *, first: int | None = None) -> None:
        """Writes this rank's failure to crash/, and to status.json the failure that caused those of the other ranks, as
        far as the reports in crash/ show it.

        `first`: rank whose failure caused this one, if known.
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
        written = None
        while (found := self._first_failure()) != written:  # another rank may report while this one writes
            self._write(STATUS, found)
            written = found

    def _first_failure(self) -> StatusReport:
        """Content of status.json after a failure: the report that names the cause best (`_blame`), with the newest
        checkpoint that any rank knows."""
        failures = self.failures() or [Failure(self._rank, self.report, 0.0)]
        known = [each.report.last_checkpoint for each in failures if each.report.last_checkpoint is not None]
        # The first rank may have completed a checkpoint after the other ranks ended.
        return replace(min(failures, key=_blame).report, last_checkpoint=max(known) if known else None)

    def failures(self) -> list[Failure]:
        """Failures of all ranks since this launch of the run, read from crash/. Empty unless this rank has failed,
        because the start time is computed from the modification time of this rank's report."""
        if self._failed is None:
            return []
        try:
            begun = self._failed.stat().st_mtime - (self._timer() - self._started) - _START_SKEW_SECONDS
            failures = [_read(path) for path in sorted(self._failed.parent.glob("rank_*.json"))]
        except OSError:  # the folder was removed
            return []
        return [failure for failure in failures if failure is not None and failure.time >= begun]

    def _earlier(self) -> StatusReport:
        """Content of status.json, which an earlier launch or another rank has written; a default report if there is
        none."""
        try:
            if self._run_dir is not None:
                return StatusReport(**json.loads((self._run_dir / STATUS).read_text()))
        except (OSError, ValueError, TypeError):
            pass
        return StatusReport()

    def _peer_failed(self, earlier: StatusReport) -> bool:
        """Touches STARTED. Returns True if status.json has another rank's failure since this launch, which must be
        kept."""
        if self._run_dir is None:
            return False
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            started, status = self._run_dir / STARTED, self._run_dir / STATUS
            started.touch()
            recent = started.stat().st_mtime - status.stat().st_mtime < _START_SECONDS
            return recent and earlier.state == "failed"
        except OSError:
            return False

    def _write(self, name: str, report: StatusReport) -> Path | None:
        """Atomically replaces the file `name` in the run folder; returns its path, or None if writing failed."""
        if self._run_dir is None:
            return None
        self._written = self._timer()
        path = self._run_dir / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomically(path) as file:
                file.write(json.dumps(asdict(report), indent=1).encode() + b"\n")
            return path
        except OSError as error:
            if not self._said:
                self._say(f"cannot write {path}: {error.strerror}; training continues without it")
            self._said = True
            return None


def _read(path: Path) -> Failure | None:
    try:
        report = StatusReport(**json.loads(path.read_text()))
        rank = int(path.stem.removeprefix("rank_"))
        return None if report.code is None else Failure(rank, report, path.stat().st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def _blame(failure: Failure) -> tuple[bool, bool, float]:
    """Sort key that puts causes first, from early to late. Consequences of other ranks' failures follow, from late to
    early, because the rank that reported last has read the earlier reports; lost connections that are not yet
    attributed to another rank come last."""
    if not failure.is_consequence:
        return False, False, failure.time
    return True, failure.report.rank == failure.rank, -failure.time
