"""Self-contained HTML page about training runs, without scripts or external files. Curves are inline SVG. The expert
load of a layer is an inline image with one row per expert and one column per interval.
"""

import base64
import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType

from megatron_moe.logs.metrics_file import Record, read_metrics, validation_losses, validation_tag

Points = list[tuple[float, float]]

_COLOURS = ("#2f6db3", "#d1603d", "#3c8d5a", "#7b4ea3", "#b8860b", "#4f9fa8", "#a83f63", "#555555")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 270, 64, 14, 12, 36
_MOST_POINTS, _MOST_COLUMNS = 1200, 240
_FULL_SCALE = 3.0
"""Load, as a multiple of the mean, at and above which the colour is darkest."""
_LAYER_LOAD = re.compile(r"moe/tokens_per_expert_layer_(\d+)$")
_ENTRY = re.compile(r"^  ([\w-]+): (.*?)(?:  +# .*)?$")
_NOT_COMPARED = ("run-dir", "save", "load", "local-rank")
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff;margin:24px auto;max-width:1120px;padding:0 16px}
h1{font-size:22px}h2{font-size:17px;margin:28px 0 6px}.grid{display:flex;flex-wrap:wrap;gap:16px}
figure{margin:0}figcaption{font-weight:600;margin:8px 0 2px}svg{max-width:100%;height:auto}
table{border-collapse:collapse;margin:8px 0}td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}.key{display:inline-block;width:12px;height:12px;margin:0 5px 0 14px}
.load{display:flex;flex-wrap:wrap;gap:12px}
.load img{width:250px;height:110px;image-rendering:pixelated;border:1px solid #ddd}
p{margin:4px 0}.note{color:#666}
"""
_VALIDATION_LOSS = validation_tag("validation")
_CHARTS: Mapping[str, tuple[str, str, float]] = MappingProxyType(
    {
        "lm loss": ("Training loss (nats per token)", "", 1.0),
        _VALIDATION_LOSS: ("Validation loss (nats per token)", "", 1.0),
        "grad-norm": ("Gradient norm", "", 1.0),
        "learning-rate": ("Learning rate", "", 1.0),
        "throughput": ("Throughput (TFLOP/s per GPU)", "", 1.0),
        "tokens-per-second-per-gpu": ("Throughput (tokens/s per GPU)", "", 1.0),
        "mem-max-allocated-bytes": ("Peak memory (GiB)", "memory is recorded on GPUs", 1 / 2**30),
        "moe/load_entropy": ("Routing entropy (1: all experts have the same load)", "the model has no experts", 1.0),
        "moe/dead_experts": ("Dead experts (mean number per layer)", "the model has no experts", 1.0),
        "moe/max_violation": ("Load of the busiest expert / mean - 1", "the model has no experts", 1.0),
    }
)
"""Key of metrics.jsonl -> (title of the chart, note if no run has the key, factor from recorded values to the unit of
the title)."""


@dataclass(frozen=True)
class RunRecords:
    """Records and flags of one run folder."""

    name: str
    records: list[Record]
    flags: dict[str, str]
    """Flag -> value in run.yaml; empty without the file."""

    @classmethod
    def read(cls, folder: Path, name: str) -> "RunRecords":
        """Reads metrics.jsonl and run.yaml. Raises DataProblem for a damaged file, OSError for an unreadable one."""
        path = folder / "run.yaml"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = {match[1]: match[2].strip() for line in lines if (match := _ENTRY.match(line))}
        return cls(name, read_metrics(folder / "metrics.jsonl"), found)

    def series(self, key: str, factor: float = 1.0) -> Points:
        """Returns (iteration, value * `factor`) for every iteration with a finite value of `key`. If an iteration has
        several records, the last one is used. The validation loss is the mean over the validation sets."""
        pairs = (
            validation_losses(self.records)
            if key == _VALIDATION_LOSS
            else {record["iteration"]: record[key] for record in self.records if key in record}
        )
        return [(x, y * factor) for x, y in pairs.items() if isinstance(y, int | float) and math.isfinite(y)]


def html_page(runs: Sequence[RunRecords]) -> str:
    """Returns the HTML page about the runs. Losses are compared with those of the first run."""
    names = ", ".join(run.name for run in runs)
    body = [f"<h1>{escape(names)}</h1>", _legend(runs), _summary(runs)]
    body += ["<h2>Curves</h2>", '<div class="grid">', *_charts(runs), "</div>", *_missing(runs)]
    if len(runs) > 1:
        body += ["<h2>Differences</h2>", *_differences(runs)]
    for run in runs:
        body += _loads(run)
    head = f'<meta charset="utf-8"/><title>{escape(names)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _legend(runs: Sequence[RunRecords]) -> str:
    keys = (f'<span class="key" style="background:{_colour(i)}"></span>{escape(r.name)}' for i, r in enumerate(runs))
    return f"<p>{''.join(keys)}</p>"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _summary(runs: Sequence[RunRecords]) -> str:
    """HTML table with the last value of every curve."""
    used = [(key, *_CHARTS[key]) for key in _CHARTS if any(run.series(key) for run in runs)]
    rows = ["<tr><th>last value</th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"]
    iterations = "".join(f"<td>{max((r['iteration'] for r in run.records), default=0)}</td>" for run in runs)
    rows.append(f"<tr><td>Iterations</td>{iterations}</tr>")
    for key, title, _, factor in used:
        last = (run.series(key, factor)[-1:] for run in runs)
        cells = "".join(f"<td>{_number(values[0][1]) if values else ''}</td>" for values in last)
        rows.append(f"<tr><td>{escape(title)}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _charts(runs: Sequence[RunRecords]) -> Iterator[str]:
    for key, (title, _, factor) in _CHARTS.items():
        curves = [run.series(key, factor) for run in runs]
        if any(curves):
            yield f"<figure><figcaption>{escape(title)}</figcaption>{chart(curves, title)}</figure>"


def _missing(runs: Sequence[RunRecords]) -> Iterator[str]:
    for key, (title, note, _) in _CHARTS.items():
        if note and not any(run.series(key) for run in runs):
            yield f'<p class="note">{escape(title)}: not recorded; {note}.</p>'


def _differences(runs: Sequence[RunRecords]) -> Iterator[str]:
    """Yields HTML with the flags that differ between runs, and the training loss of each run minus that of the first
    run."""
    first, *others = runs
    names = dict.fromkeys(name for run in runs for name in run.flags if name not in _NOT_COMPARED)
    differing = [name for name in names if len({run.flags.get(name) for run in runs} - {None}) > 1]
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = [
        f"<tr><td>--{name}</td>" + "".join(f"<td>{escape(run.flags.get(name, ''))}</td>" for run in runs) + "</tr>"
        for name in differing
    ]
    yield f"<table><tr><th>flag</th>{heads}</tr>{''.join(rows)}</table>" if rows else "<p>All flags are equal.</p>"
    base = dict(first.series("lm loss"))
    curves: list[Points] = [[], *([(x, y - base[x]) for x, y in run.series("lm loss") if x in base] for run in others)]
    if any(curves):
        title = f"Training loss minus that of {first.name}"
        yield f"<figure><figcaption>{escape(title)}</figcaption>{chart(curves, title)}</figure>"


def _loads(run: RunRecords) -> Iterator[str]:
    """Yields HTML with an image of the expert load of every MoE layer."""
    keys = {int(match[1]): key for record in run.records for key in record if (match := _LAYER_LOAD.match(key))}
    if not keys:
        return
    yield f"<h2>Expert load per layer: {escape(run.name)}</h2>"
    yield (
        '<p class="note">One row per expert, time from left to right. White: no tokens; blue: the mean load; '
        f"red: {_FULL_SCALE:g} times the mean or more.</p>"
    )
    yield '<div class="load">'
    for layer in sorted(keys):
        columns = [record[keys[layer]] for record in run.records if keys[layer] in record]
        dead = sum(not any(column[expert] for column in columns[-1:]) for expert in range(len(columns[0])))
        text = f"layer {layer}: {len(columns[0])} experts, {dead} without tokens at the end"
        picture = base64.b64encode(load_picture(columns)).decode()
        source = f"data:image/png;base64,{picture}"
        yield f'<figure><figcaption>{text}</figcaption><img alt="expert load, {text}" src="{source}"/></figure>'
    yield "</div>"


def load_picture(columns: Sequence[Sequence[float]]) -> bytes:
    """PNG image of expert loads relative to their mean, with one row per expert and one column per interval (or per
    several consecutive intervals). `columns`: for each interval, the load of every expert."""
    per_pixel = -(-len(columns) // _MOST_COLUMNS)
    groups = [columns[start : start + per_pixel] for start in range(0, len(columns), per_pixel)]
    loads = [[sum(values) for values in zip(*group, strict=True)] for group in groups]
    relative = [[value * len(load) / (sum(load) or 1) for value in load] for load in loads]
    rows = [b"\0" + b"".join(_shade(column[expert]) for column in relative) for expert in range(len(relative[0]))]
    header = struct.pack(">IIBBBBB", len(relative), len(rows), 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _shade(load: float) -> bytes:
    """Colour of a load relative to the mean: white at 0, blue at 1, red from `_FULL_SCALE` on."""
    white, blue, red = (255, 255, 255), (79, 134, 198), (190, 40, 40)
    low, high, share = (white, blue, load) if load <= 1 else (blue, red, min((load - 1) / (_FULL_SCALE - 1), 1.0))
    return bytes(round(a + (b - a) * share) for a, b in zip(low, high, strict=True))


def chart(curves: Sequence[Points], title: str) -> str:
    """SVG chart of curves over iterations. The index of a curve determines its colour; empty curves are omitted."""
    drawn = [point for curve in curves for point in curve]
    x_ticks, y_ticks = _ticks([x for x, _ in drawn]), _ticks([y for _, y in drawn])

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        _, y = to_pixels(x_ticks[0], tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{_number(tick)}</text>')
    for tick in x_ticks:
        x, _ = to_pixels(tick, y_ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle" font-size="11">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end" font-size="11">iteration</text>')
    for index, curve in enumerate(curves):
        step = -(-len(curve) // _MOST_POINTS) or 1
        kept = [*curve[:-1:step], *curve[-1:]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_pixels(*point) for point in kept))
        shape = f'points="{line}" fill="none" stroke="{_colour(index)}" stroke-width="1.6"'
        parts += [f"<polyline {shape}/>"] if len(kept) > 1 else []
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(index)}"/>'
            for x, y in map(lambda p: to_pixels(*p), kept)
            if len(kept) < 9
        ]
    return "".join([*parts, "</svg>"])


def _ticks(values: Iterable[float]) -> list[float]:
    """About five round numbers that enclose the values; at least two."""
    values = list(values)
    low, high = min(values), max(values)
    if low == high:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step)
    return [first_or_next * step for first_or_next in range(first, math.ceil(high / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"
