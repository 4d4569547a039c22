"""Restart policy for job scripts: decides whether to start a run again after it ended.

The decision uses status.json, because launchers lose exit codes, and the history of earlier launches, which limits
restarts without a new checkpoint.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.logs.run_lock import lock_holder
from megatron_moe.resilience.run_status import STARTED, STATUS, StatusReport

HISTORY = "restarts.jsonl"
"""File in the run folder with one `LaunchOutcome` per line."""

_SIGNALLED = 128
"""Offset of exit codes after signals: shells report 128 + n for a process that signal n ended."""
_LOCK_SECONDS = 10.0
"""Time within which ranks release the lock of the run folder after their launcher has died."""

RESTARTED: Mapping[int, str] = MappingProxyType(
    {
        ExitCode.HANG: "the run hung",
        ExitCode.OTHER_RANK: "a rank ended without a report: its node failed, or it was killed",
        ExitCode.DRIFT: "copies of the weights differed: suspect the hardware",
        ExitCode.RENDEZVOUS: "the ranks could not connect to each other",
        ExitCode.LAUNCHER: "the launcher of a rank died",
        ExitCode.RERUN_DISAMBIGUATE: "a step with a suspected hardware error must be repeated on other hardware",
        ExitCode.PREEMPTED_SAVED: "it was preempted and has saved",
        ExitCode.PREEMPTED_UNSAVED: "it was preempted before it could save",
    }
)
"""Maps exit codes after which a restart may succeed to the reason for the restart. All other codes need manual
intervention."""


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """Exit code and progress of one launch of a run, and whether the run was restarted."""

    time: float
    code: int
    iteration: int
    last_checkpoint: int | None
    restart: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision whether to start the run again, and its reason."""

    restart: bool
    reason: str
    suspect_host: str | None = None
    """Host that the next launch should avoid; None if no host is suspected."""


def decide_restart(
    report: StatusReport | None, exit_code: int, earlier: tuple[LaunchOutcome, ...] = (), patience: int = 3
) -> Decision:
    """Decides to restart if the run was killed or its exit code is in `RESTARTED`. Decides against a restart after
    `patience` consecutive launches (including this one) without a new checkpoint.

    Args:
        report: status.json of this launch; None if it was not written.
        exit_code: exit code of the launcher; used only if `report` is None.
        earlier: endings of earlier launches, oldest first.
    """
    decision = _decide_alone(report, exit_code)
    if not decision.restart:
        return decision
    num_fruitless = _num_fruitless((report.last_checkpoint or 0) if report else 0, earlier)
    if num_fruitless < patience:
        return decision
    where = f"iteration {report.iteration}" if report else "the start"
    reason = (
        f"{decision.reason}; this is launch number {num_fruitless} in a row without a new checkpoint, and it ended at "
        f"{where}: find the cause, then start the run manually"
    )
    return replace(decision, restart=False, reason=reason)


def _num_fruitless(reached: int, earlier: tuple[LaunchOutcome, ...]) -> int:
    """Number of consecutive launches, up to this one, without a new checkpoint, counted from the last manual start.
    `reached`: iteration of the newest checkpoint after this launch; 0 if there is none or it is not known."""
    number = newest = 0
    is_manual = True
    for last, restart in [*((each.last_checkpoint or 0, each.restart) for each in earlier), (reached, True)]:
        number = 0 if last > newest else number + 1
        newest = last if is_manual else max(newest, last)  # a manual start may begin anew
        is_manual = not restart
        if is_manual:
            number, newest = 0, last
    return number


def _decide_alone(report: StatusReport | None, exit_code: int) -> Decision:
    """Makes the decision from the ending of this launch only, without the history of earlier launches."""
    if report is None and exit_code == 0:
        return Decision(restart=False, reason="finished")
    if report is None and exit_code > _SIGNALLED and exit_code != ExitCode.INTERRUPTED:
        return Decision(restart=True, reason=f"signal {exit_code - _SIGNALLED} ended it before it wrote {STATUS}")
    if report is None:
        cause = "an error in the command line or the environment, see the log"
        if exit_code == ExitCode.BUG:  # torchrun's code for every failure
            cause = (
                "either an error in the command line or the environment, see the log, or a rank that was killed, "
                "which torchrun cannot distinguish; scripts/launch.sh and tools/torchrun.py can"
            )
        return Decision(restart=False, reason=f"exit code {exit_code} before it wrote {STATUS}: {cause}")
    if report.state == "finished":
        return Decision(restart=False, reason=f"finished: {report.sentence or f'iteration {report.iteration}'}")
    if report.code is None:
        return Decision(restart=True, reason="it ended without a report: it was killed, or its node failed")
    if report.code in RESTARTED:
        suspect = report.host if report.code == ExitCode.DRIFT else None
        return Decision(restart=True, reason=RESTARTED[report.code], suspect_host=suspect)
    return Decision(restart=False, reason=f"exit code {report.code}: {report.sentence or 'no message'}")


def read_report(run_dir: Path, since: float = 0.0) -> StatusReport | None:
    """Content of status.json if it is from this launch, i.e. not older than `since` (seconds since the epoch by the
    file server's clock). Otherwise returns a default report if any rank has started since then, else None."""
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


def read_history(run_dir: Path) -> tuple[LaunchOutcome, ...]:
    """Reads the endings of earlier launches; unreadable lines are skipped."""
    path = run_dir / HISTORY
    endings = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            endings.append(LaunchOutcome(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return tuple(endings)


def decide_and_record(
    run_dir: Path,
    exit_code: int,
    *,
    since: float,
    now: float,
    patience: int = 3,
    sleep: Callable[[float], None] = time.sleep,
) -> Decision:
    """Decides whether to restart the run in `run_dir`, and appends the exit code and the decision to its history.

    If another job still holds the lock of the folder after a delay in which this job's ranks can end, the run is not
    restarted and the history remains unchanged. `since` (time of the last launch) and `now` are seconds since the epoch
    by the same clock, which may differ from other hosts' clocks.
    """
    holder = lock_holder(run_dir)
    if holder is not None:
        sleep(_LOCK_SECONDS)
        holder = lock_holder(run_dir)
    if holder is not None:
        return Decision(restart=False, reason=f"another job writes into the run folder {run_dir}: {holder}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / HISTORY).touch()
    begun = (run_dir / HISTORY).stat().st_mtime - (now - since)
    report = read_report(run_dir, begun)
    decision = decide_restart(report, exit_code, read_history(run_dir), patience)
    known = report or StatusReport()
    ending = LaunchOutcome(
        time=now,
        code=exit_code if known.code is None else known.code,
        iteration=known.iteration,
        last_checkpoint=known.last_checkpoint,
        restart=decision.restart,
        reason=decision.reason,
    )
    with open(run_dir / HISTORY, "a") as history:
        history.write(json.dumps(asdict(ending)) + "\n")
    return decision
