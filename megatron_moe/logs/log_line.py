"""Step and validation reports, and their log lines.

The default line has Megatron's fields, order, formats and ` |` separators, so that log parsers keep working; additional
fields come last. `--log-style short` prints one line of at most 120 columns.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.metrics import Metric

_DUMP_COLUMNS = 48


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Host values of the steps since the last report. Averages are over the steps whose update was applied."""

    when: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    batch_size: int
    """Sequences per step over all ranks."""
    tokens_per_step: int
    num_steps: int = 1
    """Steps covered by this report."""
    step_seconds: float
    """Mean wall time of one step."""
    learning_rate: float
    """Learning rate after the scheduler step of the last iteration, as in Megatron's line."""
    applied_learning_rate: float
    """Learning rate of the last iteration's update."""
    losses: Mapping[str, float]
    """Averages, in the order to print: "lm loss" first."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics recorded by modules: balancing losses and load statistics, per layer."""
    grad_norm: float
    """L2 norm over all parameters before clipping."""
    grad_norm_parts: Mapping[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    """Number of gradient elements that are exactly 0."""
    params_norm: float | None = None
    loss_scale: float = 1.0
    skipped_samples: int = 0
    skipped_iterations: int = 0
    """Rejected updates since the last report."""
    nan_iterations: int = 0
    """Non-finite losses since the last report."""
    world_size: int = 1
    flops_per_step: float = 0.0
    """Model FLOPs of the global batch, without recomputation."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device in the compute dtype; None if unknown."""

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s per device."""
        return self.flops_per_step / (self.step_seconds * 1e12 * self.world_size)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / (self.step_seconds * self.world_size)

    @property
    def model_flops_utilization(self) -> float | None:
        """Model FLOPs per second over the device's peak (MFU, arXiv 2204.02311 appendix B)."""
        return None if self.peak_flops is None else self.tflops_per_gpu * 1e12 / self.peak_flops

    @property
    def remaining(self) -> timedelta:
        """Estimated time to the last iteration."""
        return timedelta(seconds=round((self.train_iters - self.iteration) * self.step_seconds))

    @property
    def all_losses(self) -> dict[str, float]:
        """`losses`, then the recorded losses."""
        recorded = {name: value for name, value in scalars(self.metrics).items() if is_loss(name)}
        return {**self.losses, **recorded}

    @property
    def other_scalars(self) -> dict[str, float]:
        """Recorded scalars that are not losses."""
        return {name: value for name, value in scalars(self.metrics).items() if not is_loss(name)}


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Mean loss per token on a held-out data set."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    where: str = ""
    """Suffix of "validation loss at iteration N" at the end of a run: "on validation set" or "on test set"."""
    data_set: str = ""
    """Name of the data set; empty if there is only one."""
    split: str = "validation"
    """"validation" or "test"; part of the tags."""


class IntervalReading(Protocol):
    """Host values of one step's results."""

    @property
    def iteration(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def norms(self) -> Mapping[str, float]:
        """L2 norms of the gradient before clipping, by parameter group; "all" is the global norm."""
        ...

    @property
    def proceed(self) -> bool:
        """True if the update was applied."""
        ...

    @property
    def learning_rate(self) -> float:
        """Learning rate after the scheduler step."""
        ...

    @property
    def applied_learning_rate(self) -> float:
        """Learning rate of the step's update."""
        ...

    @property
    def num_samples(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Interval:
    """Accumulates step results until the next report.

    Losses are averaged over the steps whose update was applied, as in Megatron, and time over all steps; norm, learning
    rate and batch size are those of the last step.
    """

    def __init__(self, *, train_iters: int, seq_length: int, world_size: int, peak_flops: float | None = None) -> None:
        self.train_iters = train_iters
        self.seq_length = seq_length
        self.world_size = world_size
        self.peak_flops = peak_flops
        self._readings: list[IntervalReading] = []

    def add(self, reading: IntervalReading) -> None:
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
        """Builds the report of all steps since the last one and resets the interval; needs at least one step.

        `flops_of`: FLOPs of a step by its number of sequences.
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


def is_loss(name: str) -> bool:
    """True for losses, which print with six digits; other scalars print with two."""
    return name.endswith("loss")


def scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Scalar metrics, reduced over all layers."""
    return {name: metric.value for name, metric in metrics.items() if not isinstance(metric.value, list)}


def perplexity(loss: float) -> float:
    """exp(loss), limited to exp(20) as in Megatron; NaN for NaN."""
    return math.exp(min(20.0, loss)) if loss == loss else loss


def _worst_layer(metric: Metric) -> float:
    values = [value for value in (metric.value, *metric.layers.values()) if not isinstance(value, list)]
    return max(values, default=math.nan)


def step_line(report: StepReport, config: LoggingConfig) -> str:
    """Line of one report in the style of `--log-style`."""
    return short_line(report) if config.log_style == "short" else megatron_line(report, config)


def megatron_line(report: StepReport, config: LoggingConfig) -> str:
    """Megatron's iteration line; `--log-throughput` appends tokens/s and MFU."""
    parts = [
        f" [{report.when:%Y-%m-%d %H:%M:%S.%f}] iteration {report.iteration:8d}/{report.train_iters:8d}",
        f" consumed samples: {report.consumed_samples:12d}",
    ]
    if report.skipped_samples:
        parts.append(f" skipped samples: {report.skipped_samples:12d}")
    parts.append(f" elapsed time per iteration (ms): {report.step_seconds * 1e3:.1f}")
    if config.log_throughput:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {report.tflops_per_gpu:.1f}")
    parts.append(f" learning rate: {report.learning_rate:.6E}")
    parts.append(f" global batch size: {report.batch_size:5d}")
    # Megatron omits negative averages and NaN; NaN is shown here.
    parts += [f" {name}: {value:.6E}" for name, value in report.all_losses.items() if not value < 0.0]
    parts += [f" {name}: {value:.2f}" for name, value in report.other_scalars.items()]
    parts.append(f" loss scale: {report.loss_scale:.1f}")
    parts.append(f" grad norm: {report.grad_norm:.3f}")
    if report.num_zeros is not None:
        parts.append(f" num zeros: {report.num_zeros}")
    if report.params_norm is not None:
        parts.append(f" params norm: {report.params_norm:.3f}")
    parts.append(f" number of skipped iterations: {report.skipped_iterations:3d}")
    parts.append(f" number of nan iterations: {report.nan_iterations:3d}")
    if config.log_throughput:
        parts.append(f" tokens/s/GPU: {report.tokens_per_second_per_gpu:.0f}")
        if (mfu := report.model_flops_utilization) is not None:
            parts.append(f" MFU: {mfu:.1%}")
    return "".join(f"{part} |" for part in parts)


def short_line(report: StepReport) -> str:
    """Line of at most 120 columns: iteration, time left, loss, gradient norm, learning rate, speed, expert load."""
    width = len(str(report.train_iters))
    parts = [
        f"{report.iteration:{width}d}/{report.train_iters} {report.iteration / max(report.train_iters, 1):4.0%}",
        f"{report.remaining} left",
        f"loss {next(iter(report.losses.values()), math.nan):.4f}",
        f"grad {report.grad_norm:.3f}",
        f"lr {report.learning_rate:.2e}",
        f"{report.tokens_per_second_per_gpu:,.0f} tok/s/GPU",
    ]
    if "moe/max_violation" in report.metrics:
        parts.append(f"max vio {_worst_layer(report.metrics['moe/max_violation']):.2f}")
    if report.skipped_iterations:
        parts.append(f"{report.skipped_iterations} skipped")
    return " | ".join(parts)[:120]


def validation_lines(report: ValidationReport) -> list[str]:
    """Megatron's validation line between two rules."""
    place = " ".join(word for word in (f"iteration {report.iteration}", report.where, report.data_set) if word)
    line = f" validation loss at {place} | "
    for name, value in report.losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    ruler = "-" * (len(line) + 1)
    return [ruler, line, ruler]


def short_validation_line(report: ValidationReport) -> str:
    """Validation line of `--log-style short` and of the live console."""
    place = " ".join(word for word in (report.where or f"on {report.split} set", report.data_set) if word)
    losses = ", ".join(f"{name} {value:.4f} (ppl {perplexity(value):.2f})" for name, value in report.losses.items())
    return f"{report.iteration} {place}: {losses}"


def arguments_dump(values: Mapping[str, object]) -> list[str]:
    """Lines of Megatron's argument dump, sorted by name."""
    rows = [f"  {name} {'.' * (_DUMP_COLUMNS - len(name))} {value}" for name, value in sorted(values.items())]
    return [
        "------------------------ arguments ------------------------",
        *rows,
        "-------------------- end of arguments ---------------------",
    ]
