"""Shall a run that ended be started again? What job scripts ask.

The answer follows from status.json, because launchers lose exit codes, and from how earlier starts of the run ended: a
run that ends again and again without a new checkpoint is not started for ever.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.logs.run_lock import held_by
from megatron_moe.resilience.run_status import (
    STARTED,
    STATUS,
    StatusReport,
)

HISTORY = "restarts.jsonl"
"""In the run folder: one Ending per line."""

_SIGNALLED = 128
"""Shells report a process that signal n ended as 128 + n."""

RESTARTED: Mapping[int, str] = MappingProxyType(
    {
        ExitCode.HANG: "the run hung",
        ExitCode.OTHER_RANK: "a rank vanished without a report: its node failed, or it was killed",
        ExitCode.DRIFT: "copies of the weights differed: suspect the hardware",
        ExitCode.RENDEZVOUS: "the ranks could not meet",
        ExitCode.LAUNCHER: "the launcher of a rank died",
        ExitCode.RERUN_DISAMBIGUATE: "a suspicious step is to be repeated on other hardware",
        ExitCode.PREEMPTED_SAVED: "it was preempted and has saved",
        ExitCode.PREEMPTED_UNSAVED: "it was preempted before it could save",
    }
)
"""Ends that another start may mend. All others are mended by people."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one start of a run ended."""

    time: float
    code: int
    iteration: int
    last_checkpoint: int | None
    restart: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer, and a sentence about it."""

    restart: bool
    reason: str
    suspect_host: str | None = None
    """Better left out of the next start."""


def decide(
    report: StatusReport | None, exit_code: int, earlier: tuple[Ending, ...] = (), patience: int = 3
) -> Decision:
    """Starts again what another start may mend, but not after `patience` ends in a row at the same checkpoint.

    Args:
        report: status.json, if this start has written it.
        exit_code: of the launcher; believed only where there is no report.
        earlier: ends of earlier starts, the oldest first.
    """
    decision = _first_thought(report, exit_code)
    if not decision.restart:
        return decision
    reached = progress(report)
    in_vain = 1
    for ending in reversed(earlier):
        if not ending.restart or (ending.last_checkpoint or 0) < reached:
            break
        in_vain += 1
    if in_vain < patience:
        return decision
    where = f"iteration {report.iteration}" if report else "the start"
    reason = (
        f"{decision.reason}; this is end number {in_vain} in a row without a new checkpoint, the last at {where}: "
        "find the cause, then start it by hand"
    )
    return Decision(restart=False, reason=reason, suspect_host=decision.suspect_host)


def progress(report: StatusReport | None) -> int:
    """Iteration of the last checkpoint that is known."""
    return 0 if report is None else report.last_checkpoint or 0


def _first_thought(report: StatusReport | None, exit_code: int) -> Decision:
    if report is None:
        return _without_report(exit_code)
    if report.state == "finished":
        return Decision(restart=False, reason=f"finished: {report.sentence or f'iteration {report.iteration}'}")
    if report.code is None:
        return Decision(restart=True, reason="it ended without a report: it was killed, or its node failed")
    why = RESTARTED.get(report.code)
    if why is not None:
        suspect = report.host if report.code == ExitCode.DRIFT else None
        return Decision(restart=True, reason=why, suspect_host=suspect)
    return Decision(restart=False, reason=f"exit code {report.code}: {report.sentence or 'no sentence'}")


def _without_report(exit_code: int) -> Decision:
    if exit_code == 0:
        return Decision(restart=False, reason="finished")
    if exit_code > _SIGNALLED and exit_code != ExitCode.INTERRUPTED:
        return Decision(restart=True, reason=f"signal {exit_code - _SIGNALLED} ended it before it wrote {STATUS}")
    reason = (
        f"exit code {exit_code} before it wrote {STATUS}: a mistake in the command line or the environment, see the log"
    )
    return Decision(restart=False, reason=reason)


def read_report(run_dir: Path, since: float = 0.0) -> StatusReport | None:
    """status.json, unless it cannot be read or is older than `since` (seconds since the epoch, by the clock that stamps
    the folder's files): of an earlier start. A start that was killed before it could write one has the report of a
    start that has just begun."""
    try:
        path = run_dir / STATUS
        report, written = StatusReport(**json.loads(path.read_text())), path.stat().st_mtime
        if written >= since:
            return report
    except (OSError, ValueError, TypeError):
        pass
    with suppress(OSError):
        if (run_dir / STARTED).stat().st_mtime >= since:
            return StatusReport()
    return None


def read_history(run_dir: Path) -> tuple[Ending, ...]:
    """How earlier starts ended; lines that cannot be read do not count."""
    path = run_dir / HISTORY
    endings = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            endings.append(Ending(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return tuple(endings)


def judge(run_dir: Path, exit_code: int, *, since: float, now: float, patience: int = 3) -> Decision:
    """Decides about the run of this folder and writes the end into its history, which is left alone while another job
    writes into the folder: that job is the run, and this start was refused.

    `since`, `now`: when this start began, and now, by one clock. The clock of the host that wrote status.json may be
    another one.
    """
    holder = held_by(run_dir)
    if holder is not None:
        return Decision(restart=False, reason=f"another job writes into the run folder {run_dir}: {holder}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / HISTORY).touch()
    begun = (run_dir / HISTORY).stat().st_mtime - (now - since)
    report = read_report(run_dir, begun)
    decision = decide(report, exit_code, read_history(run_dir), patience)
    ending = Ending(
        time=now,
        code=exit_code if report is None or report.code is None else report.code,
        iteration=0 if report is None else report.iteration,
        last_checkpoint=None if report is None else report.last_checkpoint,
        restart=decision.restart,
        reason=decision.reason,
    )
    with open(run_dir / HISTORY, "a") as history:
        history.write(json.dumps(asdict(ending)) + "\n")
    return decision
