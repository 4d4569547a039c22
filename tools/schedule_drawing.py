"""Gantt charts of a simulated pipeline schedule, one row per pipeline rank, as text or with matplotlib."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair, actions_of
from megatron_moe.pipeline.simulator import SimulationReport, TimelineSpan

CHUNKS = "abcdefghijklmnopqrstuvwxyz"
FILL = (("forward", "-"), ("backward", "="), ("backward_input", "="), ("backward_weight", "~"))
"""Fill characters of a text chart, by kind of action. Idle time is filled with dots, overlapped actions with #."""
_MAX_COLUMNS = 1_000_000
"""Maximum width of a text chart. If some actions are much shorter than the others, their labels are cut."""

FORWARD = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd")
BACKWARD = ("#c7e9c0", "#a1d99b", "#74c476", "#31a354")
WEIGHT = ("#fee6ce", "#fdd0a2", "#fdae6b", "#e6550d")
"""Colours of weight gradients, from the first model chunk to the last. FORWARD and BACKWARD are in the same order."""
IDLE = "#f3f3f3"


def entry_label(entry: Entry, vpp: int) -> str:
    """Microbatch index, and a chunk letter if `vpp` > 1. The labels of overlapped actions are joined by "|"."""
    return "|".join(str(action.microbatch) + CHUNKS[action.chunk % 26] * (vpp > 1) for action in actions_of(entry))


def text_chart(report: SimulationReport, vpp: int, width: int = 120) -> str:
    """Text chart of the schedule, split into blocks of at most `width` columns."""
    spans = [span for rank in report.spans for span in rank if span.end > span.start]  # a stage may have no cost
    # The shortest action must fit its label and a space.
    wanted = max((len(entry_label(span.entry, vpp)) + 1) / (span.end - span.start) for span in spans)
    columns = round(min(report.time * wanted, _MAX_COLUMNS))
    rows = [_row(rank, vpp, columns / report.time, columns) for rank in report.spans]
    names = [f"rank {rank} " for rank in range(len(rows))]
    margin = max(map(len, names))
    step = max(width - margin, 20)
    return "\n\n".join(
        "\n".join(f"{name:<{margin}}{row[start : start + step]}" for name, row in zip(names, rows, strict=True))
        for start in range(0, len(rows[0]), step)
    )


def text_legend(vpp: int) -> str:
    chunk = ", the letter its chunk" if vpp > 1 else ""
    return f"numbers are microbatches{chunk}; - forward, = backward (inputs), ~ backward (weights), # overlap, . idle"


def _row(spans: Sequence[TimelineSpan], vpp: int, scale: float, columns: int) -> str:
    row = ["."] * columns
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        fill = "#" if isinstance(span.entry, OverlappedPair) else dict(FILL)[span.entry.kind]
        text = entry_label(span.entry, vpp)
        row[start:end] = (text + fill * (end - start))[: end - start]
    return "".join(row)


def draw_schedule(report: SimulationReport, vpp: int, title: str, path: Path) -> None:
    """Writes the chart as PNG, SVG or PDF, by file suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    ranks = len(report.spans)
    margins = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure, axes = pyplot.subplots(figsize=(16, 1.5 + 0.5 * ranks), layout=margins)
    for rank, spans in enumerate(report.spans):
        axes.barh(rank, report.time, left=0, height=0.86, color=IDLE, zorder=0)
        for span in spans:
            _bar(axes, rank, span, vpp, report.time)
        in_flight = f"{report.in_flight[rank]} in flight"
        axes.text(report.time * 1.008, rank, in_flight, va="center", fontsize=9, color="#555")
    axes.set_xlim(0, report.time)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.set_xlabel("time")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    patches = [Patch(color=colour, label=text) for text, colour in _legend_entries(report, vpp)]
    patches.append(Patch(color=IDLE, label="idle"))
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bar(axes: Any, rank: int, span: TimelineSpan, vpp: int, time: float) -> None:
    """Draws one action as a bar, or an overlapped pair as two bars with the forward above the backward."""
    actions = actions_of(span.entry)
    height = 0.86 / len(actions)
    long = span.end - span.start
    for place, action in enumerate(actions):
        middle = rank - 0.43 + height * (place + 0.5)
        colour = _colour(action, vpp)
        edge = min(0.8, 90 * long / time)
        axes.barh(middle, long, height, span.start, color=colour, edgecolor="white", linewidth=edge)
        text = entry_label(action, vpp)
        # About 150 characters of this size fit the width of the chart.
        size = min(9.0, 9.0 * (long / time) * 150 / (len(text) + 0.6), 9.0 if len(actions) == 1 else 8.0)
        if size >= 3.5:
            dark = colour in (FORWARD[-1], BACKWARD[-1], WEIGHT[-1])
            ink = "white" if dark else "#222"
            axes.text(span.start + long / 2, middle, text, ha="center", va="center", fontsize=size, color=ink)


def _colour(action: Action, vpp: int) -> str:
    shades = {"forward": FORWARD, "backward_weight": WEIGHT}.get(action.kind, BACKWARD)
    return shades[1 if vpp == 1 else action.chunk * 3 // (vpp - 1)]


def _legend_entries(report: SimulationReport, vpp: int) -> Iterator[tuple[str, str]]:
    """Yields (text, colour) per kind of action and chunk. Full and input-gradient backward passes share one entry."""
    seen = {action for spans in report.spans for span in spans for action in actions_of(span.entry)}
    colours = {_colour(action, vpp): action for action in sorted(seen, key=_place_in_legend, reverse=True)}
    for colour, action in sorted(colours.items(), key=lambda entry: _place_in_legend(entry[1])):
        word = {"backward_input": "backward", "backward_weight": "weight gradients"}.get(action.kind, action.kind)
        yield word + f" {CHUNKS[action.chunk % 26]}" * (vpp > 1), colour


def _place_in_legend(action: Action) -> tuple[int, int]:
    kinds = [kind for kind, _ in FILL]
    return kinds.index(action.kind), action.chunk
