"""Step results, step and validation reports, and their log lines.

The default line has Megatron's fields, order, formats and ` |` separators, so that parsers of Megatron's logs work;
additional fields come last. `--log-style short` selects a line of at most 120 columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.metric_values import Metric


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one training step, as Python numbers."""

    iteration: int
    loss: float
    norms: Mapping[str, float]
    """L2 norms of the gradient before clipping, by parameter group; "all" is the global norm."""
    extra_scalars: Mapping[str, float] = field(default_factory=dict)
    """Values that only some runs measure: "num_zeros" (number of gradient elements equal to 0) and "params_norm" (both
    only when the log needs them), "overflow" (expert rows beyond their bound, relative to it), "stash_overflow" (1 if
    a rank found too few free pages for expert rows, otherwise 0), and "loss_scale" (fp16).
    """
    apply_update: bool
    """True if the update was applied."""
    state_is_finite: bool
    """True if no earlier update has stored a non-finite weight or optimizer moment on any rank."""
    learning_rate: float
    """Learning rate after this iteration's scheduler step; the log shows it, as in Megatron."""
    applied_learning_rate: float
    """Learning rate with which this step's update was computed."""
    num_samples: int
    """Number of sequences in the step, over all ranks."""
    num_tokens: int
    """Number of positions of these sequences, without padding of packed sequences."""
    seconds: float
    """Time in seconds from the end of the previous step to the end of this step, on the device."""


def mean_tokens(steps: Sequence[StepResult]) -> float:
    """Mean number of tokens of one step; steps differ in packed data and while the batch size grows."""
    return sum(step.num_tokens for step in steps) / len(steps)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Values of one log report, which covers the steps since the last report.

    The loss is averaged over the steps whose update was applied, as in Megatron, and time and throughput over all
    steps. Gradient norm, learning rate and batch size are those of the last step.
    """

    when: datetime = field(default_factory=datetime.now)
    steps: Sequence[StepResult]
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics recorded by modules, by name: balancing losses and expert-load statistics."""
    world_size: int = 1
    flops_per_step: float = 0.0
    """Model FLOPs of one step over all ranks, averaged over the steps; recomputation is not counted."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device in the compute dtype; None if unknown."""

    @property
    def last(self) -> StepResult:
        return self.steps[-1]

    @property
    def iteration(self) -> int:
        return self.last.iteration

    @property
    def loss(self) -> float:
        applied = [step.loss for step in self.steps if step.apply_update]
        return sum(applied) / len(applied) if applied else self.last.loss

    @property
    def step_seconds(self) -> float:
        """Mean time of one step, in seconds."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def skipped_iterations(self) -> int:
        """Number of steps whose update was skipped."""
        return sum(not step.apply_update for step in self.steps)

    @property
    def nan_iterations(self) -> int:
        """Number of steps with a non-finite loss."""
        return sum(not math.isfinite(step.loss) for step in self.steps)

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per device, from the mean step time."""
        return self.flops_per_step / (self.step_seconds * 1e12 * self.world_size)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return mean_tokens(self.steps) / (self.step_seconds * self.world_size)

    @property
    def model_flops_utilization(self) -> float | None:
        """Model FLOP/s as a fraction of the device's peak (MFU, arXiv 2204.02311 appendix B)."""
        return None if self.peak_flops is None else self.tflops_per_gpu * 1e12 / self.peak_flops

    @property
    def remaining(self) -> timedelta:
        """Estimated time until the last iteration ends, from the mean step time."""
        return timedelta(seconds=round((self.train_iters - self.iteration) * self.step_seconds))


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Result of an evaluation: `loss` is the mean loss per token on a held-out data set."""

    iteration: int
    consumed_samples: int
    loss: float
    where: str = ""
    """Text after "validation loss at iteration N" at the end of the run: "on validation set" or "on test set"."""
    data_set: str = ""
    """Name of the data set; empty if the run has only one validation set."""
    split: str = "validation"
    """Split of the data, "validation" or "test"; part of the metric tags."""


def scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Values of the metrics by name, reduced over layers; metrics that are vectors are omitted."""
    return {name: metric.value for name, metric in metrics.items() if not isinstance(metric.value, list)}


def perplexity(loss: float) -> float:
    """exp(loss), at most exp(20) as in Megatron; NaN if the loss is NaN."""
    return math.exp(min(20.0, loss)) if loss == loss else loss


def step_line(report: StepReport, config: LoggingConfig) -> str:
    """Formats a report as one log line, in the style that `--log-style` selects."""
    return short_log_line(report) if config.log_style == "short" else megatron_log_line(report, config)


def megatron_log_line(report: StepReport, config: LoggingConfig) -> str:
    """Formats Megatron's log line of an iteration. `--log-throughput` adds TFLOP/s, tokens/s and MFU."""
    parts = [
        f" [{report.when:%Y-%m-%d %H:%M:%S.%f}] iteration {report.iteration:8d}/{report.train_iters:8d}",
        f" consumed samples: {report.consumed_samples:12d}",
    ]
    parts.append(f" elapsed time per iteration (ms): {report.step_seconds * 1e3:.1f}")
    if config.log_throughput:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {report.tflops_per_gpu:.1f}")
    last = report.last
    parts.append(f" learning rate: {last.learning_rate:.6E}")
    parts.append(f" global batch size: {last.num_samples:5d}")
    recorded = scalars(report.metrics)
    losses = {"lm loss": report.loss, **{name: value for name, value in recorded.items() if name.endswith("loss")}}
    # Megatron omits negative averages and NaN; NaN is shown here.
    parts += [f" {name}: {value:.6E}" for name, value in losses.items() if not value < 0.0]
    parts += [f" {name}: {value:.2f}" for name, value in recorded.items() if name not in losses]
    parts.append(f" loss scale: {last.extra_scalars.get('loss_scale', 1.0):.1f}")
    parts.append(f" grad norm: {last.norms['all']:.3f}")
    if "num_zeros" in last.extra_scalars:
        parts.append(f" num zeros: {last.extra_scalars['num_zeros']:.0f}")
    if "params_norm" in last.extra_scalars:
        parts.append(f" params norm: {last.extra_scalars['params_norm']:.3f}")
    parts.append(f" number of skipped iterations: {report.skipped_iterations:3d}")
    parts.append(f" number of nan iterations: {report.nan_iterations:3d}")
    if config.log_throughput:
        parts.append(f" tokens/s/GPU: {report.tokens_per_second_per_gpu:.0f}")
        if (mfu := report.model_flops_utilization) is not None:
            parts.append(f" MFU: {mfu:.1%}")
    return "".join(f"{part} |" for part in parts)


def short_log_line(report: StepReport) -> str:
    """Log line of at most 120 columns: iteration, time left, loss, gradient norm, learning rate, speed, expert load."""
    width = len(str(report.train_iters))
    parts = [
        f"{report.iteration:{width}d}/{report.train_iters} {report.iteration / max(report.train_iters, 1):4.0%}",
        f"{report.remaining} left",
        f"loss {report.loss:.4f}",
        f"grad {report.last.norms['all']:.3f}",
        f"lr {report.last.learning_rate:.2e}",
        f"{report.tokens_per_second_per_gpu:,.0f} tok/s/GPU",
    ]
    violation = report.metrics.get("moe/max_violation")
    if violation is not None:
        worst = max(value for value in (violation.value, *violation.layers.values()) if not isinstance(value, list))
        parts.append(f"max vio {worst:.2f}")
    if report.skipped_iterations:
        parts.append(f"{report.skipped_iterations} skipped")
    return " | ".join(parts)[:120]


def validation_lines(report: ValidationReport) -> list[str]:
    """Formats Megatron's validation line and the lines of dashes before and after it."""
    place = " ".join(word for word in (f"iteration {report.iteration}", report.where, report.data_set) if word)
    ppl = perplexity(report.loss)
    line = f" validation loss at {place} | lm loss value: {report.loss:.6E} | lm loss PPL: {ppl:.6E} | "
    ruler = "-" * (len(line) + 1)
    return [ruler, line, ruler]


def short_validation_line(report: ValidationReport) -> str:
    """Short validation line, used with `--log-style short` and on a live console."""
    place = " ".join(word for word in (report.where or f"on {report.split} set", report.data_set) if word)
    return f"{report.iteration} {place}: lm loss {report.loss:.4f} (ppl {perplexity(report.loss):.2f})"
