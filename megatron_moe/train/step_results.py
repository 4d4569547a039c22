"""Step results, which the host reads from the device one iteration late to avoid waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.training import StepCounts
from megatron_moe.logs.log_line import StepResult
from megatron_moe.logs.timers import Timestamp
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext


def largest_overflows(context: ParallelContext, comm: ExpertComm | None, stash: PagedStash | None) -> dict[str, Tensor]:
    """Overflows because of which a step must be repeated, as entries of `StepOutcome.extra_scalars`: maxima over all
    ranks, fp32 scalars on the device. Collective; called once per step."""
    found: dict[str, Tensor] = {}
    if comm is not None and comm.overflow is not None:
        found["overflow"] = comm.overflow
    if stash is not None:
        found["stash_overflow"] = stash.overflowed.float()
    if not found:
        return found
    # collective over world: 4 or 8 bytes
    largest = all_reduce_(torch.stack([*found.values()]), context.group("world"), "max")
    return dict(zip(found, largest.unbind(), strict=True))


@dataclass(frozen=True)
class StepOutcome:
    """Results of one step on the device; see `StepResult` for the fields of the same names."""

    loss: Tensor
    """Mean loss per token of this step over all ranks."""
    norms: dict[str, Tensor]
    extra_scalars: dict[str, Tensor]
    apply_update: Tensor
    state_is_finite: Tensor
    counts: StepCounts
    learning_rate: float
    applied_learning_rate: float
    iteration: int

    def scalars(self) -> Tensor:
        """Starts an asynchronous copy of all device values to host memory; returns the host tensor, fp64 [n]."""
        values = (
            self.loss,
            self.apply_update,
            self.state_is_finite,
            *self.norms.values(),
            *self.extra_scalars.values(),
        )
        scalars = torch.stack([value.double() for value in values])
        if scalars.is_cuda:
            pinned = torch.empty_like(scalars, device="cpu", pin_memory=True)
            return pinned.copy_(scalars, non_blocking=True)
        return scalars

    def result(self, scalars: Tensor, seconds: float) -> StepResult:
        """Results as Python numbers. `scalars`: host tensor of `scalars()` after its copy has completed."""
        loss, apply_update, state_is_finite, *others = scalars.tolist()
        return StepResult(
            iteration=self.iteration,
            loss=loss,
            norms=dict(zip(self.norms, others[: len(self.norms)], strict=True)),
            extra_scalars=dict(zip(self.extra_scalars, others[len(self.norms) :], strict=True)),
            apply_update=bool(apply_update),
            state_is_finite=bool(state_is_finite),
            learning_rate=self.learning_rate,
            applied_learning_rate=self.applied_learning_rate,
            num_samples=self.counts.num_samples,
            num_tokens=self.counts.num_tokens,
            seconds=seconds,
        )


class StepResultReader:
    """Keeps the outcome of the newest step and reads its results when the next outcome is pushed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[StepOutcome, Tensor, Timestamp, Timestamp] | None = None
        """Newest outcome, host tensor to which its values are being copied, begin and end of the step."""
        self._last_end = Timestamp(device)

    def push(self, outcome: StepOutcome) -> StepResult | None:
        """Takes a step's outcome and returns the results of the previous step; None for the first."""
        previous = self.flush()
        scalars = outcome.scalars()
        begin, self._last_end = self._last_end, Timestamp(self._device)
        self._pending = outcome, scalars, begin, self._last_end
        return previous

    def flush(self) -> StepResult | None:
        """Waits for the pending step and returns its results; None if there is none."""
        if self._pending is None:
            return None
        (outcome, scalars, begin, end), self._pending = self._pending, None
        end.synchronize()
        return outcome.result(scalars, end.seconds_since(begin))

    def discard_pending(self) -> None:
        """Drops the results of the pending step."""
        self._pending = None

    def restart_clock(self) -> None:
        """Excludes the time since the last step from the next step's time."""
        self._last_end = Timestamp(self._device)
