"""When a run ends, other than by an error."""

import time
from collections.abc import Callable

import torch

from megatron_moe.config.training import LoopConfig
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.signals import Signals, signal_name


class ExitConditions:
    """Answers before each step whether to leave, the same on every rank."""

    def __init__(
        self,
        config: LoopConfig,
        context: ParallelContext,
        *,
        iteration: int,
        last_iteration: int,
        signals: Signals | None = None,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All ranks make it together.

        Args:
            iteration: where this start of the run begins.
            last_iteration: after which training ends.
            signals: of this process; None: none are listened to.
            begun: what the clock said when this process started, since which `--exit-duration-in-mins` counts, as in
                Megatron: a job's time also passes while a model is built and loaded. None: now.
            clock: seconds.
        """
        self.reason = "no training was asked for (--skip-train)"
        """A sentence for the log, once `now` has said yes."""
        self.preempted = False
        """A signal is the reason."""
        self._config = config
        self._first = iteration
        self._last = last_iteration
        self._signals = signals or Signals()
        self._clock = clock
        self._start = clock() if begun is None else begun
        self._asks = self._signals.active or config.exit_duration_minutes is not None
        self._group = context.host_group() if self._asks else context.group("world")

    def now(self, iteration: int) -> bool:
        """Is it time to leave after `iteration` steps?"""
        reason = self._reason(iteration)
        if reason is not None:
            self.reason = reason
        return reason is not None

    def _reason(self, iteration: int) -> str | None:
        config = self._config
        minutes, signal_number = self._agreed() if self._asks else (0.0, 0)
        if signal_number:
            self.preempted = True
            return f"exiting program at iteration {iteration} because of {signal_name(signal_number)}"
        if config.exit_duration_minutes is not None and minutes > config.exit_duration_minutes:
            return f"exiting program after {minutes:.1f} minutes"
        if config.exit_interval and iteration > self._first and iteration % config.exit_interval == 0:
            return f"exiting program at iteration {iteration}"
        if iteration >= self._last:
            return f"finished after {iteration} iterations"
        return None

    def _agreed(self) -> tuple[float, int]:
        """The longest time in minutes, and a signal that any rank has got, or 0. Clocks differ and signals come at
        different moments, but all ranks must leave after the same iteration."""
        mine = [(self._clock() - self._start) / 60, float(self._signals.received or 0)]
        # world: 16 bytes, in host memory
        minutes, signal_number = all_reduce_(torch.tensor(mine, dtype=torch.float64), self._group, "max").tolist()
        return minutes, int(signal_number)
