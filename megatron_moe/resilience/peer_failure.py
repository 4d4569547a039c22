"""Attributes broken connections to the rank that failed first, according to the reports of all ranks in crash/."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem
from megatron_moe.resilience.run_status import Failure, RunStatus
from megatron_moe.resilience.watchdog import Watchdog

_BROKE = "the connection to another rank broke"
_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "nccl error",
    "remote process exited",
    "timed out waiting",
)
"""Phrases, in lower case, in messages of gloo, NCCL and the store about a lost connection."""


@dataclass(frozen=True)
class PeerFailures:
    """Context manager that converts a broken-connection or timeout error to an OtherRankProblem that names the rank
    that failed first; other errors propagate unchanged."""

    run_dir: Path | None
    """Run folder, whose crash/ contains the reports of all ranks. If None, no rank can be named."""
    status: RunStatus
    """Status writer of this rank. Before attribution, it writes this rank's report for other ranks to read."""
    watchdog: Watchdog
    """Watchdog of this rank. Its phase "exit" begins before attribution, because the interrupted phase may be near its
    time limit."""
    rank: int
    world_size: int
    seconds: float = 2.0
    """Maximum time to wait for the reports of other ranks. Afterwards, the error names the ranks without a report."""

    def __enter__(self) -> "PeerFailures":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raises OtherRankProblem in place of a broken-connection error."""
        if error is not None and self.world_size > 1 and is_broken_connection(error):
            self.watchdog.enter("exit")
            self.status.fail(ExitCode.OTHER_RANK, _BROKE)
            raise self._problem(timed_out="timed out" in str(error).lower()) from error

    def _problem(self, *, timed_out: bool) -> OtherRankProblem:
        if self.run_dir is None:
            return OtherRankProblem(f"{_BROKE}: see the output of the other ranks, or give --run-dir for their reports")
        failures = self._failures()
        causes = [failure for failure in failures.values() if not failure.is_consequence]
        if causes:
            first = min(causes, key=lambda failure: failure.time)
            cause = f"code {first.report.code}: {first.report.sentence}"
            return OtherRankProblem(f"rank {first.rank} failed first, {cause}", first.rank)
        missing = [rank for rank in range(self.world_size) if rank not in failures and rank != self.rank]
        if not missing:
            return OtherRankProblem(f"{_BROKE}, and no report in {self.run_dir}/crash gives a cause")
        named = ", ".join(f"rank {rank}" for rank in missing)
        if timed_out:
            sentence = f"a collective timed out: {named} did not take part and wrote no report; it was stopped or hangs"
            return OtherRankProblem(sentence, missing[0], ExitCode.HANG)
        sentence = (
            f"{named} ended without a report: it was killed, or its node failed; the connections of other ranks broke"
        )
        return OtherRankProblem(sentence, missing[0])

    def _failures(self) -> dict[int, Failure]:
        """Returns the reports of other ranks since this launch of the run, keyed by rank. Waits until all other ranks
        have reported, one of them has reported a cause other than a lost connection, or `seconds` have passed."""
        until = time.monotonic() + self.seconds
        while True:
            found = {failure.rank: failure for failure in self.status.failures() if failure.rank != self.rank}
            own = any(not failure.is_consequence for failure in found.values())
            if own or len(found) == self.world_size - 1 or time.monotonic() >= until:
                return found
            time.sleep(0.05)


def is_broken_connection(error: BaseException) -> bool:
    """True if torch.distributed raised the error because the connection to another rank was lost."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or any(words in text for words in _BROKEN)
