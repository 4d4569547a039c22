"""Reads what a step left on the device, one step late, so that the host never waits for the step it just launched."""

from dataclasses import dataclass

import torch

from megatron_moe.logs.timers import Moment
from megatron_moe.train.trainer import StepOutcome


@dataclass(frozen=True)
class StepResult:
    """A step's results as host numbers."""

    iteration: int
    loss: float
    norms: dict[str, float]
    figures: dict[str, float]
    """See `StepOutcome.figures`."""
    proceed: bool
    sound: bool
    """See `StepOutcome.sound`."""
    learning_rate: float
    """See `StepOutcome.learning_rate`."""
    applied_learning_rate: float
    num_samples: int
    seconds: float
    """From the end of the step before to the end of this one, on the device."""


@dataclass(frozen=True)
class _Held:
    outcome: StepOutcome
    figures: torch.Tensor
    begin: Moment
    end: Moment


class StepResultReader:
    """Holds the newest outcome until the next one is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: _Held | None = None
        self._last_end = Moment(device)

    def push(self, outcome: StepOutcome) -> StepResult | None:
        """Takes a step's outcome and returns the reading of the step before it; None for the first."""
        previous = self.flush()
        scalars = (outcome.loss, outcome.proceed, outcome.sound, *outcome.norms.values(), *outcome.figures.values())
        figures = torch.stack([scalar.double() for scalar in scalars])
        if figures.is_cuda:
            host = torch.empty_like(figures, device="cpu", pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
        begin, self._last_end = self._last_end, Moment(self._device)
        self._held = _Held(outcome, figures, begin, self._last_end)
        return previous

    def flush(self) -> StepResult | None:
        """The reading of the held step, waiting for it; None when none is held."""
        if self._held is None:
            return None
        held, self._held = self._held, None
        held.end.wait()
        outcome = held.outcome
        loss, proceed, sound, *others = held.figures.tolist()
        norms, figures = others[: len(outcome.norms)], others[len(outcome.norms) :]
        return StepResult(
            iteration=outcome.iteration,
            loss=loss,
            norms=dict(zip(outcome.norms, norms, strict=True)),
            figures=dict(zip(outcome.figures, figures, strict=True)),
            proceed=bool(proceed),
            sound=bool(sound),
            learning_rate=outcome.learning_rate,
            applied_learning_rate=outcome.applied_learning_rate,
            num_samples=outcome.num_samples,
            seconds=held.end.seconds_since(held.begin),
        )

    def restart_clock(self) -> None:
        """Leaves out of the next step's time what happened since the last step: evaluation, saving."""
        self._last_end = Moment(self._device)
