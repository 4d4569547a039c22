"""Exit conditions of the training loop: last iteration, exit interval, exit duration and signals."""

import signal
import time
from collections.abc import Callable

import torch

from megatron_moe.config.training import LoopConfig
from megatron_moe.parallel.collectives import PendingCollective, all_reduce_, start_all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.signals import Signals, signal_name


class ExitConditions:
    """Decides before each step whether the run ends, identically on every rank."""

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
        """Construction is collective.

        Args:
            iteration: iteration at which this process begins training; training ends after `last_iteration`.
            begun: time at which the process started; None means now. As in Megatron, `--exit-duration-in-mins` counts
                from this time, so that it includes model construction and loading.
            clock: monotonic clock, seconds.
        """
        self.reason = "training is disabled (--skip-train)"
        """Log line with the reason why the run ends; valid once `is_reached` has returned True."""
        self.preempted = False
        """True if the run ends because of a signal."""
        self._config = config
        self._first = iteration
        self._last = last_iteration
        self._signals = signals or Signals()
        self._clock = clock
        self._start = clock() if begun is None else begun
        self._agrees_at_once = self._signals.needs_grace or config.exit_duration_in_mins is not None
        self._group = context.host_group()
        self._interrupted = torch.zeros(())
        """Number of ranks that had received Ctrl-C before the previous call of `is_reached`; the sum is complete after
        its `wait`."""
        self._pending = PendingCollective()

    def is_reached(self, iteration: int) -> bool:
        """True if the run ends after `iteration` steps; sets `reason` and, if a signal ends the run, `preempted`. All
        ranks must call it."""
        reason = self._reason(iteration)
        self.reason = reason or self.reason
        return reason is not None

    def _reason(self, iteration: int) -> str | None:
        config = self._config
        minutes, signal_number = self._agreed() if self._agrees_at_once else (0.0, self._interrupted_before())
        if signal_number:
            self.preempted = True
            return f"exiting program at iteration {iteration} because of {signal_name(signal_number)}"
        if config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins:
            return f"exiting program after {minutes:.1f} minutes"
        if config.exit_interval and iteration > self._first and iteration % config.exit_interval == 0:
            return f"exiting program at iteration {iteration}"
        if iteration >= self._last:
            return f"finished after {iteration} iteration{'s' * (iteration != 1)}"
        return None

    def _interrupted_before(self) -> int:
        """Returns SIGINT if a rank had received it when `is_reached` was called for the previous iteration, else 0. The
        delay of one iteration avoids waiting for other ranks; a single rank has no delay."""
        if self._group.size == 1:
            return self._signals.received or 0
        self._pending.wait()
        interrupted = bool(self._interrupted.item())
        self._interrupted = torch.tensor(float(self._signals.received is not None))
        # collective over world: 4 bytes, in host memory
        self._pending = start_all_reduce_(self._interrupted, self._group)
        return int(signal.SIGINT) if interrupted else 0

    def _agreed(self) -> tuple[float, int]:
        """Maxima over all ranks of the elapsed minutes and of the received signal number (0 for none). All ranks get
        the same values and therefore end after the same iteration."""
        own = [(self._clock() - self._start) / 60, float(self._signals.received or 0)]
        # collective over world: 16 bytes, in host memory
        minutes, signal_number = all_reduce_(torch.tensor(own, dtype=torch.float64), self._group, "max").tolist()
        return minutes, int(signal_number)
