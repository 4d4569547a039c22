"""What a step, a validation and the start of a run look like as text. Pure functions from reports to lines.

The default line has Megatron's fields, order, formats and ` |` separators, so that tools that parse its logs go on
working; fields that Megatron does not know come at the end. `--log-style short` is for people: one line of at most 120
columns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.metrics import Metric

_DUMP_COLUMNS = 48


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Figures of the steps since the last report, ready on the host. Averages are over the steps that were applied."""

    when: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    batch_size: int
    """Sequences per step over all ranks."""
    tokens_per_step: int
    num_steps: int = 1
    """Steps that this report covers."""
    step_seconds: float
    """Mean wall time of one step."""
    learning_rate: float
    """After the last step's samples, as in Megatron-LM's line."""
    applied_learning_rate: float
    """In the last step's update."""
    losses: Mapping[str, float]
    """Averages, in the order to print: "lm loss" first."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What the modules recorded: balancing losses, load figures, per layer."""
    grad_norm: float
    """L2 norm over all parameters before clipping."""
    grad_norm_parts: Mapping[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    """Gradient elements that are exactly 0."""
    params_norm: float | None = None
    loss_scale: float = 1.0
    skipped_samples: int = 0
    skipped_iterations: int = 0
    """Since the last report: updates that were refused."""
    nan_iterations: int = 0
    """Since the last report: losses that were not finite."""
    world_size: int = 1
    flops_per_step: float = 0.0
    """Of the model over the whole batch; recomputation is not counted."""
    peak_flops: float | None = None
    """Of one device in the compute dtype, FLOP/s; None: unknown."""

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s per device."""
        return self.flops_per_step / (self.step_seconds * 1e12 * self.world_size)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / (self.step_seconds * self.world_size)

    @property
    def model_flops_utilization(self) -> float | None:
        """Share of the device's peak spent on the model's FLOPs (MFU, arXiv 2204.02311 appendix B)."""
        return None if self.peak_flops is None else self.tflops_per_gpu * 1e12 / self.peak_flops

    @property
    def remaining(self) -> timedelta:
        """Time to the last iteration at the speed of this report."""
        return timedelta(seconds=round((self.train_iters - self.iteration) * self.step_seconds))

    @property
    def all_losses(self) -> dict[str, float]:
        """`losses`, then the recorded metrics that are losses."""
        recorded = {name: value for name, value in scalars(self.metrics).items() if is_loss(name)}
        return {**self.losses, **recorded}

    @property
    def figures(self) -> dict[str, float]:
        """The recorded scalars that are not losses."""
        return {name: value for name, value in scalars(self.metrics).items() if not is_loss(name)}


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Mean loss per token on a held-out data set."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    where: str = ""
    """Completes "validation loss at iteration N": "on validation set", "on test set" at the end of a run."""
    data_set: str = ""
    """Name, when there are several."""
    split: str = "validation"
    """Or "test": names the tags."""


def is_loss(name: str) -> bool:
    """Losses print with six digits, other figures with two."""
    return name.endswith("loss")


def scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics that are one number, over all layers."""
    return {name: metric.value for name, metric in metrics.items() if not isinstance(metric.value, list)}


def perplexity(loss: float) -> float:
    """exp(loss), held at exp(20) as in Megatron; nan for nan."""
    return math.exp(min(20.0, loss)) if loss == loss else loss


def _worst_layer(metric: Metric) -> float:
    values = [value for value in (metric.value, *metric.layers.values()) if not isinstance(value, list)]
    return max(values, default=math.nan)


def step_line(report: StepReport, config: LoggingConfig) -> str:
    """The line of one report in the style the run asked for."""
    return short_line(report) if config.style == "short" else megatron_line(report, config)


def megatron_line(report: StepReport, config: LoggingConfig) -> str:
    """Megatron's iteration line; with `--log-throughput` it ends with tokens/s and the share of the device's peak."""
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
    # A negative average is left out, as in Megatron; one that is not a number is shown.
    parts += [f" {name}: {value:.6E}" for name, value in report.all_losses.items() if not value < 0.0]
    parts += [f" {name}: {value:.2f}" for name, value in report.figures.items()]
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
    """At most 120 columns: place, time left, loss, gradient norm, learning rate, speed, worst expert load."""
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
    """Megatron's validation line between two rulers."""
    place = " ".join(word for word in (f"iteration {report.iteration}", report.where, report.data_set) if word)
    line = f" validation loss at {place} | "
    for name, value in report.losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    ruler = "-" * (len(line) + 1)
    return [ruler, line, ruler]


def short_validation_line(report: ValidationReport) -> str:
    """The same for people."""
    place = " ".join(word for word in (report.where or f"on {report.split} set", report.data_set) if word)
    losses = ", ".join(f"{name} {value:.4f} (ppl {perplexity(value):.2f})" for name, value in report.losses.items())
    return f"{report.iteration} {place}: {losses}"


def arguments_dump(values: Mapping[str, object]) -> list[str]:
    """Megatron's list of arguments, sorted by name."""
    rows = [f"  {name} {'.' * (_DUMP_COLUMNS - len(name))} {value}" for name, value in sorted(values.items())]
    return [
        "------------------------ arguments ------------------------",
        *rows,
        "-------------------- end of arguments ---------------------",
    ]
