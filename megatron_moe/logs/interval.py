"""Averages over the steps between two reports, from host numbers."""

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from megatron_moe.logs.log_line import StepReport
from megatron_moe.logs.metrics import Metric


class IntervalReading(Protocol):
    """One step's results as host numbers."""

    @property
    def iteration(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def norms(self) -> Mapping[str, float]:
        """L2 norms of the gradient before clipping: "all" and its parts."""
        ...

    @property
    def proceed(self) -> bool:
        """The update was applied."""
        ...

    @property
    def learning_rate(self) -> float:
        """After the step's samples."""
        ...

    @property
    def applied_learning_rate(self) -> float:
        """In the step's update."""
        ...

    @property
    def num_samples(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Interval:
    """Collects readings until a report is due. Losses are averaged over the steps whose update was applied, as in
    Megatron; time over all steps; norm, learning rate and batch size are those of the last step."""

    def __init__(self, *, train_iters: int, seq_length: int, world_size: int, peak_flops: float | None = None) -> None:
        self.train_iters = train_iters
        self.seq_length = seq_length
        self.world_size = world_size
        self.peak_flops = peak_flops
        self._readings: list[IntervalReading] = []

    def add(self, reading: IntervalReading) -> None:
        """Takes one step's results."""
        self._readings.append(reading)

    def report(
        self,
        *,
        consumed_samples: int,
        flops_of: Callable[[int], float],
        metrics: Mapping[str, Metric],
        num_zeros: int | None = None,
        params_norm: float | None = None,
        when: datetime | None = None,
    ) -> StepReport:
        """The report of all readings since the last one; starts anew. At least one reading is needed.

        `flops_of`: FLOPs of a step, given its number of sequences.
        """
        readings, self._readings = self._readings, []
        assert readings, "a report needs at least one step"
        applied = [reading.loss for reading in readings if reading.proceed]
        last = readings[-1]
        return StepReport(
            when=when or datetime.now(),
            iteration=last.iteration,
            train_iters=self.train_iters,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self.seq_length,
            batch_size=last.num_samples,
            tokens_per_step=last.num_samples * self.seq_length,
            num_steps=len(readings),
            step_seconds=sum(reading.seconds for reading in readings) / len(readings),
            learning_rate=last.learning_rate,
            applied_learning_rate=last.applied_learning_rate,
            losses={"lm loss": sum(applied) / len(applied) if applied else last.loss},
            metrics=metrics,
            grad_norm=last.norms["all"],
            grad_norm_parts={name: norm for name, norm in last.norms.items() if name != "all"},
            num_zeros=num_zeros,
            params_norm=params_norm,
            skipped_iterations=len(readings) - len(applied),
            nan_iterations=sum(not math.isfinite(reading.loss) for reading in readings),
            world_size=self.world_size,
            flops_per_step=flops_of(last.num_samples),
            peak_flops=self.peak_flops,
        )
