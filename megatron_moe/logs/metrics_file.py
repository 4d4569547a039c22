"""Tags of the scalars in reports (Megatron's TensorBoard tags, and "moe/..." tags), and records of metrics.jsonl.

A record is a JSON object: "iteration", "samples" and the values of one report by tag. Non-finite values are null.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import StepReport, ValidationReport, perplexity, scalars
from megatron_moe.logs.metric_values import Metric, MetricValue

Record = dict[str, Any]
MEMORY_TAGS = ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count")
_ONLY_BY_ITERATION = ("mem-", "moe/", "throughput", "tokens-per-second-per-gpu", "mfu")


def step_tags(report: StepReport) -> dict[str, float]:
    """All scalars of the report by tag, except values per layer."""
    last = report.last
    tags: dict[str, float | None] = {
        "learning-rate": last.learning_rate,
        "batch-size": last.num_samples,
        "lm loss": report.loss,
        "loss-scale": last.extra_scalars.get("loss_scale", 1.0),
        "world-size": report.world_size,
        "grad-norm": last.norms["all"],
        **{f"grad-norm {part}": norm for part, norm in last.norms.items() if part != "all"},
        "num-zeros": last.extra_scalars.get("num_zeros"),
        "params-norm": last.extra_scalars.get("params_norm"),
        "iteration-time": report.step_seconds,
        "throughput": report.tflops_per_gpu,
        "tokens-per-second-per-gpu": report.tokens_per_second_per_gpu,
        "mfu": report.model_flops_utilization,
        **scalars(report.metrics),
    }
    return {name: value for name, value in tags.items() if value is not None}


def layer_tags(metrics: Mapping[str, Metric]) -> dict[str, MetricValue]:
    """Values per layer of all metrics, by tag. Tags are `moe/{name}_layer_{i}`; i is the global layer index from 0."""
    return {
        f"moe/{name.removeprefix('moe/')}_layer_{layer}": figure
        for name, metric in metrics.items()
        for layer, figure in metric.layers.items()
    }


def validation_tag(split: str, data_set: str = "") -> str:
    """Tag of the loss on a split: `lm loss SPLIT`, or `lm loss SPLIT-DATA_SET` for a named data set."""
    return f"lm loss {split}" + (f"-{data_set}" if data_set else "")


def validation_tags(report: ValidationReport) -> dict[str, float]:
    """Loss and perplexity by tag: `validation_tag` and the same with the suffix ` ppl`."""
    name = validation_tag(report.split, report.data_set)
    return {name: report.loss, f"{name} ppl": perplexity(report.loss)}


def validation_losses(records: Iterable[Record]) -> dict[int, float]:
    """Validation loss by iteration: the mean over the validation sets; NaN if the loss of a set is not finite."""
    tag = validation_tag("validation")
    found: dict[int, dict[str, float]] = {}
    for record in records:
        for key, loss in record.items():
            if key == tag or (key.startswith(f"{tag}-") and not key.endswith(" ppl")):
                found.setdefault(record["iteration"], {})[key] = math.nan if loss is None else loss
    return {iteration: mean(losses.values()) for iteration, losses in found.items()}


def enabled_tags(tags: Mapping[str, float], config: LoggingConfig) -> dict[str, float]:
    """Subset of `tags` that the run's flags enable for TensorBoard and W&B; metrics.jsonl has all tags."""
    hidden: set[str] = set()
    if not config.log_timers_to_tensorboard:
        hidden.update(tag for tag in tags if tag.endswith("-time"))
    if not config.log_world_size_to_tensorboard:
        hidden.add("world-size")
    if not config.log_memory_to_tensorboard:
        hidden.update(MEMORY_TAGS)
    if not config.log_validation_ppl_to_tensorboard:
        hidden.update(tag for tag in tags if tag.endswith(" ppl"))
    return {name: value for name, value in tags.items() if name not in hidden}


def has_samples_variant(tag: str) -> bool:
    """True if TensorBoard also plots the scalar over consumed samples, with the tag `{tag} vs samples`."""
    return not tag.startswith(_ONLY_BY_ITERATION)


def step_record(report: StepReport) -> dict[str, Any]:
    """Record of a step report in metrics.jsonl: values of all tags, including values per layer and per expert."""
    return {
        "iteration": report.iteration,
        "samples": report.consumed_samples,
        "tokens": report.consumed_tokens,
        "time": report.when.isoformat(),
        **step_tags(report),
        "applied-learning-rate": report.last.applied_learning_rate,
        "skipped-iterations": report.skipped_iterations,
        "nan-iterations": report.nan_iterations,
        **layer_tags(report.metrics),
    }


def validation_record(report: ValidationReport) -> dict[str, Any]:
    """Record of a validation report in metrics.jsonl."""
    return {"iteration": report.iteration, "samples": report.consumed_samples, **validation_tags(report)}


def encode(record: Mapping[str, Any]) -> bytes:
    """Encodes a record as one line of metrics.jsonl, with its newline."""
    content = {key: _plain(value) for key, value in record.items()}
    return (json.dumps(content, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_metrics(path: Path) -> list[Record]:
    """Reads the records of metrics.jsonl in order. Skips an incomplete last line, which a killed process may leave.

    Raises DataProblem if any other line is not a JSON object.
    """
    records = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = _parse(line)
            if record is not None:
                records.append(record)
            elif line.endswith(b"\n"):
                raise DataProblem(f"{path}: line {number} is not a JSON object; remove the line or the file")
    return records


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drops an incomplete last line and the records after `iteration`, which a resumed run writes again. The others are
    not read: their iterations ascend, and a long run writes many GB."""
    if not path.exists():
        return
    end, lacks_newline = 0, False
    for start, line in _lines_from_end(path):
        record = _parse(line)
        if record is None and line.endswith(b"\n"):
            read_metrics(path)  # raises DataProblem with the number of the line
        elif record is not None and record["iteration"] <= iteration:
            end, lacks_newline = start + len(line), not line.endswith(b"\n")
            break
    os.truncate(path, end)
    if lacks_newline:
        with open(path, "ab") as file:
            file.write(b"\n")


def recorded_tags(path: Path, iteration: int) -> frozenset[str]:
    """Keys of all records of one iteration, which is the last in the file; empty if the file does not exist."""
    tags: set[str] = set()
    for _, line in _lines_from_end(path) if path.exists() else ():
        record = _parse(line)
        if record is None or record["iteration"] < iteration:
            break
        tags.update(record)
    return frozenset(tags)


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, line with its newline) for the lines of a file, from the last to the first."""
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        if not end:  # an empty file cannot be mapped
            return
        with mmap(file.fileno(), end, access=ACCESS_READ) as content:
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                yield start, content[start:end]
                end = start


def _parse(line: bytes) -> Record | None:
    """Parses a line; None if it is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: Any) -> Any:
    """Converts a value for JSON: non-finite numbers become None, and elements of lists get six significant digits."""
    if isinstance(value, list):
        return [_plain(float(f"{element:.6g}")) for element in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
