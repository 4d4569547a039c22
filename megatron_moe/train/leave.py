"""When a run ends, other than by an error."""

import time
from collections.abc import Callable

import torch

from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.train import LoopSpec


class Leave:
    """Answers before each step whether to leave, the same on every rank."""

    def __init__(
        self,
        spec: LoopSpec,
        context: ParallelContext,
        *,
        iteration: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`iteration`: where this start of the run begins. `clock`: seconds."""
        self.reason = "no training was asked for (--skip-train)"
        """A sentence for the log, once `now` has said yes."""
        self._spec = spec
        self._first = iteration
        self._context = context
        self._clock = clock
        self._start = clock()

    def now(self, iteration: int) -> bool:
        """Is it time to leave after `iteration` steps?"""
        reason = self._reason(iteration)
        if reason is not None:
            self.reason = reason
        return reason is not None

    def _reason(self, iteration: int) -> str | None:
        spec = self._spec
        if spec.exit_duration_minutes is not None:
            minutes = self._longest_minutes()
            if minutes > spec.exit_duration_minutes:
                return f"exiting program after {minutes:.1f} minutes"
        if spec.exit_interval and iteration > self._first and iteration % spec.exit_interval == 0:
            return f"exiting program at iteration {iteration}"
        if iteration >= spec.train_iters:
            return f"finished after {iteration} iterations"
        return None

    def _longest_minutes(self) -> float:
        minutes = torch.tensor([(self._clock() - self._start) / 60], device=self._context.device)
        # world: 4 bytes; clocks differ, and all ranks must leave after the same iteration
        return float(all_reduce_(minutes, self._context.group("world"), "max"))
