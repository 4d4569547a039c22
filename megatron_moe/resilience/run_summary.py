"""Comparison table of runs: one row per run folder, from metrics.jsonl and status.json."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.logs.metrics_file import Record, read_metrics
from megatron_moe.resilience.requeue import read_report

METRICS = "metrics.jsonl"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """Statistics of one run, None where unknown. Speeds are medians over the reports after the first `skip`."""

    run: str
    state: str
    iterations: int
    ranks: int | None
    seconds_per_step: float | None
    tflops_per_gpu: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    """Model FLOPs utilisation."""
    peak_memory_gib: float | None
    """Largest allocation on the reporting rank's device, GiB."""
    loss: float | None
    """Training loss of the last report."""
    validation_loss: float | None
    """Last validation loss."""


_HEADINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", ""),
        "state": ("state", ""),
        "iterations": ("iterations", "d"),
        "ranks": ("ranks", "d"),
        "seconds_per_step": ("s/step", ".3f"),
        "tflops_per_gpu": ("TFLOP/s/GPU", ".1f"),
        "tokens_per_second_per_gpu": ("tokens/s/GPU", ".0f"),
        "mfu": ("MFU", ".1%"),
        "peak_memory_gib": ("peak GiB", ".1f"),
        "loss": ("loss", ".4f"),
        "validation_loss": ("validation", ".4f"),
    }
)
"""Heading and format of every column."""


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Run folders at and below the given folders, without duplicates, sorted per folder.

    Raises DataProblem for a folder without runs.
    """
    found: list[Path] = []
    for place in places:
        here = sorted(path.parent for path in place.rglob(METRICS)) if place.is_dir() else []
        if not here:
            raise DataProblem(f"{place} holds no run: no {METRICS} in it or below it")
        found += [run for run in here if run not in found]
    return found


def summarize(run: Path, name: str, skip: int = 1) -> RunRow:
    """Row of a run folder. `skip`: initial reports excluded from the speeds, if there are later ones."""
    records = read_metrics(run / METRICS)
    steps = [record for record in records if "iteration-time" in record]
    timed = steps[skip:] or steps
    report = read_report(run)
    return RunRow(
        run=name,
        state="unknown" if report is None else report.state,
        iterations=max((record["iteration"] for record in steps), default=0),
        ranks=_whole(_last(steps, "world-size")),
        seconds_per_step=_median(timed, "iteration-time"),
        tflops_per_gpu=_median(timed, "throughput"),
        tokens_per_second_per_gpu=_median(timed, "tokens-per-second-per-gpu"),
        mfu=_median(timed, "mfu"),
        peak_memory_gib=_gib(_largest(steps, "mem-max-allocated-bytes")),
        loss=_last(steps, "lm loss"),
        validation_loss=_last(records, "lm loss validation"),
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """Short names: the paths without their common prefix; of a single run the folder name."""
    if len(runs) == 1:
        return [runs[0].resolve().name]
    parts = [run.resolve().parts for run in runs]
    common = 0
    while all(len(each) > common + 1 and each[common] == parts[0][common] for each in parts):
        common += 1
    return ["/".join(each[common:]) for each in parts]


def as_text(rows: Sequence[RunRow]) -> str:
    """Aligned columns for a terminal, without empty columns."""
    table = _cells(rows)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(_aligned(cell, width, column) for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in table
    )


def as_markdown(rows: Sequence[RunRow]) -> str:
    """Markdown table, without empty columns."""
    head, *body = _cells(rows)
    rule = ["---" if column < 2 else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def as_csv(rows: Sequence[RunRow]) -> str:
    """CSV with all fields of `RunRow`, unrounded."""
    out = io.StringIO()
    names = [field.name for field in fields(RunRow)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue().rstrip("\n")


def _cells(rows: Sequence[RunRow]) -> list[list[str]]:
    shown = [name for name in _HEADINGS if any(getattr(row, name) is not None for row in rows)]
    body = [[_cell(getattr(row, name), _HEADINGS[name][1]) for name in shown] for row in rows]
    return [[_HEADINGS[name][0] for name in shown], *body]


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(cell: str, width: int, column: int) -> str:
    """Left-aligns text and right-aligns numbers."""
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def _values(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _median(records: Iterable[Record], key: str) -> float | None:
    return _of(_values(records, key), median)


def _largest(records: Iterable[Record], key: str) -> float | None:
    return _of(_values(records, key), max)


def _last(records: Iterable[Record], key: str) -> float | None:
    return _of(_values(records, key), lambda values: values[-1])


def _of(values: list[float], function: Callable[[list[float]], float]) -> float | None:
    return function(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _gib(value: float | None) -> float | None:
    return None if value is None else value / _GIB
