"""Tabulates runs: `python tools/summarize_run.py runs/a runs/lr [--format text|csv|markdown]`.

Takes run folders or folders that contain runs. Speeds are medians over a run's reports after the first.
"""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.config.text import aligned_columns
from megatron_moe.logs.metrics_file import Record, read_metrics, validation_losses
from megatron_moe.resilience.requeue import read_report
from tools._common import reports_errors, run_main, tool_parser, writing

METRICS = "metrics.jsonl"
Row = dict[str, Any]
"""Column name -> value for one run; None where unknown."""
_COLUMNS: Mapping[str, tuple[str, str]] = MappingProxyType(
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
"""Maps column names to (heading, format specification)."""
_SPEEDS: Mapping[str, str] = MappingProxyType(
    {
        "seconds_per_step": "iteration-time",
        "tflops_per_gpu": "throughput",
        "tokens_per_second_per_gpu": "tokens-per-second-per-gpu",
        "mfu": "mfu",
    }
)
"""Maps column names to keys of metrics.jsonl, for columns that are medians over the reports."""


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Run folders at and below the given folders, without duplicates, sorted within each given folder.

    Raises DataProblem for a folder without runs.
    """
    found: list[Path] = []
    for place in places:
        here = sorted(path.parent for path in place.rglob(METRICS)) if place.is_dir() else []
        if not here:
            raise DataProblem(f"{place} contains no run: there is no {METRICS} in it or below it")
        found += [run for run in here if run not in found]
    return found


def summarize(run: Path, name: str, skip: int = 1) -> Row:
    """Table row of a run folder. Speeds are medians over all reports except the first `skip`, which are included only
    if the run has no later ones. Memory is the peak on the reporting rank's device. Losses are the last reported."""
    records = read_metrics(run / METRICS)
    steps = [record for record in records if "iteration-time" in record]
    validation = validation_losses(records)
    report = read_report(run)
    speeds = {key: median(values) for key in _SPEEDS.values() if (values := _values(steps[skip:] or steps, key))}
    peak = max(_values(steps, "mem-max-allocated-bytes"), default=None)
    return {
        "run": name,
        "state": "unknown" if report is None else report.state,
        "iterations": max((record["iteration"] for record in steps), default=0),
        "ranks": _last(steps, "world-size"),
        **{column: speeds.get(key) for column, key in _SPEEDS.items()},
        "peak_memory_gib": None if peak is None else peak / 2**30,
        "loss": _last(steps, "lm loss"),
        "validation_loss": next((loss for loss in reversed(validation.values()) if isfinite(loss)), None),
    }


def names_of(runs: Sequence[Path]) -> list[str]:
    """Short run names: paths without their common prefix; for a single run, the folder name."""
    if len(runs) == 1:
        return [runs[0].resolve().name]
    parts = [run.resolve().parts for run in runs]
    common = 0
    while all(len(each) > common + 1 and each[common] == parts[0][common] for each in parts):
        common += 1
    return ["/".join(each[common:]) for each in parts]


def as_text(rows: Sequence[Row]) -> str:
    """Table with aligned columns for a terminal. Columns without values are omitted."""
    table = _cells(rows)
    return "\n".join(aligned_columns(table, range(2, len(table[0]))))


def as_markdown(rows: Sequence[Row]) -> str:
    """Markdown table. Columns without values are omitted."""
    head, *body = _cells(rows)
    rule = ["---" if column < 2 else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def as_csv(rows: Sequence[Row]) -> str:
    """CSV with all columns and unrounded values."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    shown = {name: column for name, column in _COLUMNS.items() if any(row[name] is not None for row in rows)}
    body = [["-" if row[name] is None else format(row[name], fmt) for name, (_, fmt) in shown.items()] for row in rows]
    return [[heading for heading, _ in shown.values()], *body]


def _values(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _last(records: Iterable[Record], key: str) -> float | None:
    return next(reversed(_values(records, key)), None)


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("places", type=Path, nargs="+", help="run folders, or folders with runs below them")
    parser.add_argument("--format", choices=("text", "csv", "markdown"), default="text")
    parser.add_argument("--skip", type=int, default=1, help="initial reports excluded from speeds (default: 1)")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args(argv)
    if options.skip < 0:
        parser.error(f"--skip {options.skip} is less than 0")
    runs = find_runs(options.places)
    rows = [summarize(run, name, options.skip) for run, name in zip(runs, names_of(runs), strict=True)]
    table = {"text": as_text, "csv": as_csv, "markdown": as_markdown}[options.format](rows)
    print(table)
    if options.output:
        with writing(options.output):
            options.output.write_text(table + "\n", encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    run_main(main)
