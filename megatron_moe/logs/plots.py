"""Plots of a run: loss and expert load from metrics.jsonl, and memory use during a step."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megatron_moe.logs.metrics_file import Record, read_metrics, validation_losses

_TRAIN, _VALIDATION, _INK, _GRID = "#2f6db3", "#d1603d", "#333333", "#dddddd"
_STACK = ("#1b4f8a", "#4f86c6", "#7b4ea3", "#b48bd0", "#d1603d", "#e9a23b", "#8fa89b", "#c9c9c9")
_GIB = 1 << 30
_LAYER_LOAD = re.compile(r"moe/tokens_per_expert_layer_(\d+)$")
_MOST_LABELLED_CELLS = 160
_END_OF_SCALE = 4.0


def draw_plots(run_folder: Path) -> list[Path]:
    """Draws plots/loss.png and plots/expert_load.png, each if its metrics were recorded; returns their paths.

    Raises OSError if a file cannot be read or written.
    """
    path = run_folder / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    plots = {}
    if any("lm loss" in record for record in records):
        plots["loss.png"] = draw_loss
    if any(map(_has_load, records)):
        plots["expert_load.png"] = draw_expert_load
    folder = run_folder / "plots"
    if plots:
        folder.mkdir(exist_ok=True)
    return [draw(records, folder / name, run_folder.name) for name, draw in plots.items()]


def draw_loss(records: list[Record], path: Path, title: str) -> Path:
    """Draws training and validation loss over iterations; a second horizontal axis shows tokens."""
    figure, axes = _new_figure(8.0, 4.8)
    steps = [record for record in records if "lm loss" in record]
    iterations = [record["iteration"] for record in steps]
    losses = [_number(record["lm loss"]) for record in steps]
    axes.plot(iterations, losses, color=_TRAIN, linewidth=1.6, label="training")
    if held_out := validation_losses(records):
        x, y = zip(*held_out.items(), strict=True)
        axes.plot(x, y, color=_VALIDATION, linewidth=1.2, marker="o", markersize=4.5, label="validation")
        axes.annotate(
            f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(0, 9), textcoords="offset points", color=_VALIDATION, ha="right"
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{title}: loss", loc="left", fontweight="bold", color=_INK, pad=12)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.legend(frameon=False)
    _tokens_on_top(axes, steps)
    figure.savefig(path)
    return path


def draw_expert_load(records: list[Record], path: Path, title: str) -> Path:
    """Draws a heat map of the last recorded load of every expert in every MoE layer, relative to a uniform load."""
    from matplotlib.colors import TwoSlopeNorm

    loads, iteration = latest_loads(records), max(r["iteration"] for r in records if _has_load(r))
    relative = [[tokens * len(load) / (sum(load) or 1.0) for tokens in load] for load in loads.values()]
    num_layers, num_experts = len(loads), len(relative[0])
    largest = max(map(max, relative))
    scale_end = min(max(2.0, largest), _END_OF_SCALE)
    labelled = num_layers * num_experts <= _MOST_LABELLED_CELLS
    cell_width, cell_height = (0.6, 0.45) if labelled else (0.04, 0.14)
    figure, axes = _new_figure(max(6.0, 2.0 + cell_width * num_experts), max(2.4, 1.2 + cell_height * num_layers))
    image = axes.imshow(relative, cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, scale_end), aspect="auto")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(0, num_layers, 1 + num_layers // 40), list(loads)[:: 1 + num_layers // 40])
    if labelled:
        axes.set_xticks(range(num_experts))
        for row, column in product(range(num_layers), range(num_experts)):
            value = relative[row][column]
            dark = value < 0.35 or value > 1.0 + 0.65 * (scale_end - 1.0)
            color = "white" if dark else _INK
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}: expert load at iteration {iteration}", loc="left", fontweight="bold", color=_INK, pad=10)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=24, extend="max" if largest > scale_end else "neither")
    bar.set_label("relative load (1 = even)")
    bar.set_ticks([0.0, 0.5, 1.0, *(tick for tick in (1.5, 2.0, 3.0, 4.0) if tick <= scale_end)])
    bar.ax.set_yscale("linear")
    bar.outline.set_visible(False)
    figure.savefig(path)
    return path


def draw_memory(ranks: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> Path:
    """Draws the memory use of a step by category as a stacked area chart, with one panel per rank.

    `ranks`: panel title -> memory category -> bytes after each allocation or release.
    """
    figure, first = _new_figure(9.0, 3.6 * len(ranks))
    panels = [first]
    if len(ranks) > 1:
        figure.clear()
        panels = list(figure.subplots(len(ranks), sharex=False, sharey=True))
    for axes, (title, curves) in zip(panels, ranks.items(), strict=True):
        shown = {name: [size / _GIB for size in curve] for name, curve in curves.items() if max(curve, default=0)}
        moments = range(max(map(len, shown.values()), default=0))
        axes.stackplot(moments, *shown.values(), labels=list(shown), linewidth=0, colors=_STACK[: len(shown)])
        axes.set_title(title, loc="left", fontweight="bold", color=_INK)
        axes.set_ylabel("GiB")
        axes.margins(x=0)
        axes.grid(color=_GRID, linewidth=0.6, axis="y")
        axes.set_xticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    panels[-1].set_xlabel("allocations and releases of the step, in order")
    figure.savefig(path)
    return path


def latest_loads(records: list[Record]) -> dict[int, list[float]]:
    """Maps the layer index to the number of tokens of each expert, from the last record with expert loads."""
    last = next(filter(_has_load, reversed(records)), {})
    return dict(sorted((int(match[1]), value) for key, value in last.items() if (match := _LAYER_LOAD.match(key))))


def _has_load(record: Record) -> bool:
    return any(_LAYER_LOAD.match(key) for key in record)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Creates a matplotlib figure and its axes without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    return figure, axes


def _tokens_on_top(axes: Any, steps: list[Record]) -> None:
    """Adds an axis in tokens at the top of the plot. Assumes that every step has the same number of tokens."""
    from matplotlib.ticker import EngFormatter

    last = steps[-1]
    per_iteration = last.get("tokens", 0) / last["iteration"]
    if per_iteration <= 0:
        return
    top = axes.secondary_xaxis("top", functions=(lambda x: x * per_iteration, lambda t: t / per_iteration))
    top.xaxis.set_major_formatter(EngFormatter(sep=""))
    top.set_xlabel("tokens", fontsize=9)
    top.tick_params(colors=_INK, labelsize=8)
    top.spines["top"].set_visible(False)
