"""Reports as named scalars. Names are Megatron's TensorBoard tags; figures of the MoE layers stand under "moe/"."""

from collections.abc import Mapping
from typing import Any

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import (
    StepReport,
    ValidationReport,
    perplexity,
    scalars,
)
from megatron_moe.logs.metrics import Figure, Metric

MEMORY_TAGS = ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count")
THROUGHPUT_TAGS = ("throughput", "tokens-per-second-per-gpu", "mfu")
_ONLY_BY_ITERATION = ("mem-", "moe/", "throughput", "tokens-per-second-per-gpu", "mfu", "skipped-train-samples")


def step_tags(report: StepReport) -> dict[str, float]:
    """Every scalar of the report that is not of a single layer."""
    tags: dict[str, float | None] = {
        "learning-rate": report.learning_rate,
        "batch-size": report.batch_size,
        **report.losses,
        "loss-scale": report.loss_scale,
        "world-size": report.world_size,
        "grad-norm": report.grad_norm,
        **{f"grad-norm {part}": norm for part, norm in report.grad_norm_parts.items()},
        "num-zeros": report.num_zeros,
        "params-norm": report.params_norm,
        "iteration-time": report.step_seconds,
        "throughput": report.tflops_per_gpu,
        "tokens-per-second-per-gpu": report.tokens_per_second_per_gpu,
        "mfu": report.model_flops_utilization,
        "skipped-train-samples": report.skipped_samples or None,
        **scalars(report.metrics),
    }
    return {name: value for name, value in tags.items() if value is not None}


def layer_tags(metrics: Mapping[str, Metric]) -> dict[str, Figure]:
    """`moe/{name}_layer_{i}` of every metric that was recorded per layer; i counts layers from 0."""
    return {
        f"moe/{name.removeprefix('moe/')}_layer_{layer}": figure
        for name, metric in metrics.items()
        for layer, figure in metric.layers.items()
    }


def validation_tags(report: ValidationReport) -> dict[str, float]:
    """`lm loss validation` and `lm loss validation ppl`; with several data sets `lm loss validation-NAME`."""
    suffix = report.split + (f"-{report.data_set}" if report.data_set else "")
    tags = {}
    for name, value in report.losses.items():
        tags[f"{name} {suffix}"] = value
        tags[f"{name} {suffix} ppl"] = perplexity(value)
    return tags


def wanted_tags(tags: Mapping[str, float], config: LoggingConfig) -> dict[str, float]:
    """The tags that a dashboard shows under the run's flags; metrics.jsonl keeps all."""
    hidden: set[str] = set()
    if not config.log_timers:
        hidden.update(THROUGHPUT_TAGS, (tag for tag in tags if tag.endswith("-time")))
    if not config.log_throughput:
        hidden.update(THROUGHPUT_TAGS)
    if not config.log_world_size:
        hidden.add("world-size")
    if not config.log_memory:
        hidden.update(MEMORY_TAGS)
    return {
        name: value
        for name, value in tags.items()
        if name not in hidden and (config.log_validation_ppl or not name.endswith(" ppl"))
    }


def has_samples_variant(tag: str) -> bool:
    """The tag is also drawn over consumed samples, as `{tag} vs samples`."""
    return not tag.startswith(_ONLY_BY_ITERATION)


def step_record(report: StepReport) -> dict[str, Any]:
    """The line of metrics.jsonl: all tags, layers and per-expert vectors included."""
    return {
        "iteration": report.iteration,
        "samples": report.consumed_samples,
        "tokens": report.consumed_tokens,
        "time": report.when.isoformat(),
        **step_tags(report),
        "applied-learning-rate": report.applied_learning_rate,
        "skipped-iterations": report.skipped_iterations,
        "nan-iterations": report.nan_iterations,
        **layer_tags(report.metrics),
    }


def validation_record(report: ValidationReport) -> dict[str, Any]:
    """The line of metrics.jsonl for a validation."""
    return {"iteration": report.iteration, "samples": report.consumed_samples, **validation_tags(report)}
