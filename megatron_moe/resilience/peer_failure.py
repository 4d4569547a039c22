"""When another rank dies, this one sees a broken connection. Whose fault it was is in crash/, or in who wrote nothing
there.
"""

import time
from pathlib import Path

import torch.distributed as dist

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem
from megatron_moe.resilience.run_status import Failure, RunStatus

_OTHERS_SECONDS = 2.0
"""How long a rank waits for the reports of others before it names those that left none."""
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
"""Words, in lower case, of gloo, of NCCL and of the store, for a connection that is not there any more."""


class PeerFailures:
    """While it is entered, the error of a connection that broke, or that waited too long, becomes an OtherRankProblem
    that names the rank which failed first. All other errors pass.

    Args:
        run_dir: where ranks leave their reports; None: nobody can be named.
        status: gets a first word at once, so that others see that this rank is there.
        seconds: how long to wait for the reports of others.
    """

    def __init__(
        self,
        run_dir: Path | None,
        status: RunStatus,
        *,
        rank: int,
        world_size: int,
        seconds: float = _OTHERS_SECONDS,
    ) -> None:
        self._run_dir = run_dir
        self._status = status
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds

    def __enter__(self) -> "PeerFailures":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raises OtherRankProblem in place of a broken connection."""
        if error is not None and self._world_size > 1 and is_broken_connection(error):
            self._status.fail(ExitCode.OTHER_RANK, _BROKE)
            raise self._problem(waited="timed out" in str(error).lower()) from error

    def _problem(self, *, waited: bool) -> OtherRankProblem:
        if self._run_dir is None:
            return OtherRankProblem(f"{_BROKE}: see what the others printed, or give --run-dir, where each reports")
        failures = self._failures()
        causes = [failure for failure in failures.values() if not failure.followed]
        if causes:
            first = min(causes, key=lambda failure: failure.time)
            told = f"code {first.report.code}: {first.report.sentence}"
            return OtherRankProblem(f"rank {first.rank} failed first, {told}", first.rank)
        silent = [rank for rank in range(self._world_size) if rank not in failures and rank != self._rank]
        if not silent:
            return OtherRankProblem(f"{_BROKE}, and no report in {self._run_dir}/crash says why")
        named = ", ".join(f"rank {rank}" for rank in silent)
        if waited:
            sentence = f"a collective waited too long: {named} did not come, and left no report: stopped or hanging"
            return OtherRankProblem(sentence, silent[0], ExitCode.HANG)
        sentence = f"{named} vanished without a report: killed, or its node failed; its peers' connections broke"
        return OtherRankProblem(sentence, silent[0])

    def _failures(self) -> dict[int, Failure]:
        """What other ranks have left in this start, by rank. Waits until all have, or one has failed by itself, or
        the time is up."""
        until = time.monotonic() + self._seconds
        while True:
            found = {failure.rank: failure for failure in self._status.failures() if failure.rank != self._rank}
            own = any(not failure.followed for failure in found.values())
            if own or len(found) == self._world_size - 1 or time.monotonic() >= until:
                return found
            time.sleep(0.05)


def is_broken_connection(error: BaseException) -> bool:
    """Did this error come from torch.distributed because another rank is gone?"""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or any(words in text for words in _BROKEN)
