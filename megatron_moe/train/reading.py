"""Reads what a step left on the device, one step late, so that the host never waits for the step it just launched."""

import time
from dataclasses import dataclass

import torch

from megatron_moe.train.step import StepOutcome


@dataclass(frozen=True)
class StepReading:
    """A step's results as host numbers."""

    iteration: int
    loss: float
    norms: dict[str, float]
    proceed: bool
    learning_rate: float
    num_samples: int
    seconds: float
    """From the end of the step before to the end of this one."""


class LateReader:
    """Holds the newest outcome until the next one is there."""

    def __init__(self) -> None:
        self._pending: tuple[StepOutcome, torch.Tensor, torch.cuda.Event | None] | None = None
        self._last_end = time.perf_counter()

    def push(self, outcome: StepOutcome) -> StepReading | None:
        """Takes a step's outcome and returns the reading of the step before it; None for the first."""
        previous = self.flush()
        figures = torch.stack([x.double() for x in (outcome.loss, outcome.proceed, *outcome.norms.values())])
        if figures.is_cuda:
            host = torch.empty_like(figures, device="cpu", pin_memory=True)
            host.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (outcome, host, event)
        else:
            self._pending = (outcome, figures, None)
        return previous

    def flush(self) -> StepReading | None:
        """The reading of the held step, waiting for it; None when none is held."""
        if self._pending is None:
            return None
        (outcome, figures, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        loss, proceed, *norms = figures.tolist()
        return StepReading(
            iteration=outcome.iteration,
            loss=loss,
            norms=dict(zip(outcome.norms, norms, strict=True)),
            proceed=bool(proceed),
            learning_rate=outcome.learning_rate,
            num_samples=outcome.num_samples,
            seconds=seconds,
        )

    def restart_clock(self) -> None:
        """Leaves out of the next step's time what happened since the last reading: evaluation, saving."""
        self._last_end = time.perf_counter()
