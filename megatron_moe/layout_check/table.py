"""Assembles the records of all ranks, compares them with the oracle's and explains typical differences.

The relative error of a tensor is max|difference| / max|reference|. A constant ratio of actual to expected values
indicates a missing or duplicated reduction; copies that differ indicate one that was never done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megatron_moe.layout_check.record import MetricKey, RankRecord, RecordedTensor
from megatron_moe.logs.metrics import Figure
from megatron_moe.parallel.param_meta import ParamBox
from megatron_moe.parallel.parameter import write_part

RELATIVE_TOLERANCE = 1e-12
"""A different summation order costs 4e-16 in double precision (measured); an error of 0.1 % is far above."""
ABSOLUTE_TOLERANCE = 1e-14
COPY_TOLERANCE = 1e-12
"""Allowed relative difference between two copies of one tensor."""
CONSTANT = 1e-6
"""A ratio is constant if the residual is below this share of the tensor."""


@dataclass(frozen=True)
class ComparisonRow:
    """One row of the table: a quantity, its relative error and a likely explanation."""

    what: str
    """gradient, weight, loss, norm, metric, tokens or expert bias."""
    name: str
    grid: str
    error: float
    """Relative error; inf if there is nothing to compare with."""
    ratio: float | None
    """actual / expected if constant over the tensor."""
    remark: str
    bad: bool


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    rows: tuple[ComparisonRow, ...]

    @property
    def bad(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.bad]

    @property
    def equal(self) -> bool:
        return not self.bad

    def verdict(self) -> str:
        """Verdict in one sentence."""
        largest = max((row.error for row in self.rows), default=0.0)
        if self.equal:
            return f"equal to one rank: {len(self.rows)} quantities, largest relative error {largest:.1e}"
        return f"NOT equal to one rank: {len(self.bad)} of {len(self.rows)} quantities differ, by up to {largest:.1e}"

    def text(self, *, every: bool = False) -> str:
        """Table of the rows that differ (or all rows), followed by the verdict."""
        rows = list(self.rows) if every else self.bad
        return "\n".join([*_table(rows), self.verdict()])


def compare_runs(oracle: RankRecord, ranks: Sequence[RankRecord], *, rtol: float = RELATIVE_TOLERANCE) -> Comparison:
    """Compares the records of all ranks, in rank order, with the oracle's."""
    axes = {axis: 1 + max(record.place[axis] for record in ranks) for axis in ranks[0].place}
    rows = [
        *_figure_rows("loss", [{(f"step {i}", None): x for i, x in enumerate(oracle.losses, 1)}], _losses(ranks), rtol),
        *_figure_rows("norm", [_norms(oracle)], [_norms(record) for record in ranks], rtol),
        *_figure_rows("metric", [_metrics(oracle)], [_metrics(record) for record in ranks], rtol),
        *_tensor_rows("gradient", oracle.gradients, [record.gradients for record in ranks], axes, rtol),
        *_tensor_rows("weight", oracle.weights, [record.weights for record in ranks], axes, rtol),
        *_count_rows(oracle, ranks),
    ]
    return Comparison(tuple(rows))


def _losses(ranks: Sequence[RankRecord]) -> list[dict[MetricKey, Figure]]:
    """Compares losses, which the last rank reports."""
    last = max(record.place["pp"] for record in ranks)
    return [
        {(f"step {i}", None): loss for i, loss in enumerate(record.losses, 1)}
        for record in ranks
        if record.place["pp"] == last
    ]


def _norms(record: RankRecord) -> dict[MetricKey, Figure]:
    return {
        (f"{part}, step {step}", None): norm
        for step, norms in enumerate(record.norms, 1)
        for part, norm in norms.items()
    }


def _metrics(record: RankRecord) -> dict[MetricKey, Figure]:
    return {
        (f"{name}, step {step}", layer): figure
        for step, metrics in enumerate(record.metrics, 1)
        for (name, layer), figure in metrics.items()
    }


def _figure_rows(
    what: str, expected: Sequence[Mapping[MetricKey, Figure]], ranks: Sequence[Mapping[MetricKey, Figure]], rtol: float
) -> Iterator[ComparisonRow]:
    """Compares metrics: every metric of the oracle must be on some rank and equal on all ranks that have it."""
    (oracle,) = expected
    for key, figure in oracle.items():
        name = key[0] if key[1] is None else f"{key[0]}, layer {key[1]}"
        wanted = torch.tensor(figure, dtype=torch.float64)
        known = [(rank, torch.tensor(each[key], dtype=torch.float64)) for rank, each in enumerate(ranks) if key in each]
        if not known:
            yield ComparisonRow(what, name, "", float("inf"), None, "no rank has it", bad=True)
            continue
        worst = max(known, key=lambda pair: _error(pair[1], wanted))[1]
        remark = ""
        if any(not torch.equal(value, known[0][1]) for _, value in known):
            remark = "ranks differ: " + ", ".join(f"{rank}: {value.tolist()}" for rank, value in known[:4])
        yield _row(what, name, "", worst, wanted, rtol, remark, {})


def _tensor_rows(
    what: str,
    oracle: Mapping[str, RecordedTensor],
    ranks: Sequence[Mapping[str, RecordedTensor]],
    axes: Mapping[str, int],
    rtol: float,
) -> Iterator[ComparisonRow]:
    for name, held in oracle.items():
        parts = [(rank, each[name]) for rank, each in enumerate(ranks) if name in each]
        extra = {} if not parts else dict(axes)
        if not parts:
            yield ComparisonRow(what, name, held.meta.grid, float("inf"), None, "no rank holds it", bad=True)
            continue
        whole, remark = assemble(parts, held.value)
        yield _row(what, name, held.meta.grid, whole, held.value, rtol, remark, extra)
    unknown = sorted({name for each in ranks for name in each} - set(oracle))
    for name in unknown:
        yield ComparisonRow(what, name, "", float("inf"), None, "one rank has no such parameter", bad=True)


def assemble(parts: Sequence[tuple[int, RecordedTensor]], expected: Tensor) -> tuple[Tensor, str]:
    """Global tensor from (rank, shard) pairs, and remarks on copies that differ or elements that no rank holds."""
    first = parts[0][1]
    whole = torch.full(first.global_shape, float("nan"), dtype=first.value.dtype)
    copies: dict[tuple[ParamBox, ...], list[tuple[int, RecordedTensor]]] = {}
    for rank, held in parts:
        copies.setdefault(held.boxes, []).append((rank, held))
    remarks = []
    for boxes, group in copies.items():
        write_part(whole, _merged([held.value for _, held in group]), boxes, first.meta)
        remarks.append(_about_copies(group, expected))
    if torch.isnan(whole).any():
        remarks.append(f"{int(torch.isnan(whole).sum())} elements are held by no rank")
    return whole, next((remark for remark in remarks if remark), "")


def _merged(copies: Sequence[Tensor]) -> Tensor:
    """Merges copies: every element from the first copy that holds it."""
    merged = copies[0]
    for copy in copies[1:]:
        merged = torch.where(torch.isnan(merged), copy, merged)
    return merged


def _about_copies(group: Sequence[tuple[int, RecordedTensor]], expected: Tensor) -> str:
    """Remark on copies of a tensor that should be equal."""
    (first, reference), others = group[0], group[1:]
    apart = [rank for rank, held in others if _apart(held.value, reference.value)]
    if not apart:
        return ""
    text = f"copies on ranks {[rank for rank, _ in group]} differ (rank {apart[0]} from rank {first})"
    total, here = torch.zeros_like(expected), torch.zeros_like(expected, dtype=torch.bool)
    write_part(total, torch.stack([held.value for _, held in group]).sum(dim=0), reference.boxes, reference.meta)
    write_part(here, torch.ones_like(reference.value, dtype=torch.bool), reference.boxes, reference.meta)
    ratio = constant_ratio(total[here], expected[here])
    if ratio is None:
        return f"{text}: a reduction over them is missing"
    times = "" if abs(ratio - 1) < CONSTANT else f" {ratio:.4g} times"
    return f"{text}; their sum is{times} the right value: a reduction over them is missing"


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two copies differ in elements that both hold."""
    both = ~torch.isnan(one) & ~torch.isnan(other)
    return _error(one[both], other[both]) > COPY_TOLERANCE


def constant_ratio(actual: Tensor, expected: Tensor) -> float | None:
    """actual / expected if it is constant over all elements."""
    actual, expected = actual.double(), expected.double()
    square = float((expected * expected).sum())
    if square == 0.0 or not torch.isfinite(actual).all():
        return None
    ratio = float((actual * expected).sum()) / square
    rest = float((actual - ratio * expected).abs().max())
    return ratio if rest <= CONSTANT * max(abs(ratio), CONSTANT) * float(expected.abs().max()) else None


def explain_ratio(ratio: float, axes: Mapping[str, int]) -> str:
    """Explanation of a constant ratio, with the axes whose groups have that size."""
    for value, kind in ((ratio, "doubled"), (1 / ratio if ratio else 0.0, "missing")):
        size = round(value)
        if size > 1 and abs(value - size) < 1e-4 * size:
            named = [axis for axis, ranks in axes.items() if ranks == size]
            where = f" ({' or '.join(named)})" if named else ""
            return f"looks like a {kind} reduction over a group of {size}{where}"
    return ""


def _row(
    what: str, name: str, grid: str, actual: Tensor, expected: Tensor, rtol: float, remark: str, axes: Mapping[str, int]
) -> ComparisonRow:
    if actual.shape != expected.shape:
        remark = f"shape {tuple(actual.shape)}, one rank has {tuple(expected.shape)}"
        return ComparisonRow(what, name, grid, float("inf"), None, remark, bad=True)
    error = _error(actual, expected)
    bad = bool(remark) or not error <= rtol and not _both_tiny(actual, expected)
    ratio = constant_ratio(actual, expected) if bad else None
    if not remark and ratio is not None and axes:
        remark = explain_ratio(ratio, axes)
    return ComparisonRow(what, name, grid, error, ratio, remark, bad)


def _count_rows(oracle: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[ComparisonRow]:
    """Compares token counts and expert biases bit for bit."""
    for layer, wanted in oracle.tokens.items():
        parts = [record.tokens[layer] for record in ranks if layer in record.tokens]
        total = torch.stack(parts).sum(dim=0) if parts else torch.zeros_like(wanted)
        remark = "" if torch.equal(total, wanted) else f"{total.tolist()}, one rank counts {wanted.tolist()}"
        yield ComparisonRow("tokens", f"layer {layer}", "", _error(total, wanted), None, remark, bad=bool(remark))
    for layer, bias in oracle.biases.items():
        held = [record.biases[layer] for record in ranks if layer in record.biases]
        right = bool(held) and all(torch.equal(each, bias) for each in held)
        error = max((_error(each, bias) for each in held), default=float("inf"))
        yield ComparisonRow(
            "expert bias", f"layer {layer}", "", error, None, "" if right else "not the same bits", bad=not right
        )


def _error(actual: Tensor, expected: Tensor) -> float:
    """max|difference| / max|reference|; inf if not finite."""
    actual, expected = actual.double(), expected.double()
    if actual.numel() == 0:
        return 0.0
    difference = float((actual - expected).abs().max())
    reference = float(expected.abs().max())
    if not isfinite(difference):
        both_nan = bool((torch.isnan(actual) == torch.isnan(expected)).all() and torch.isnan(expected).all())
        return 0.0 if both_nan else float("inf")
    if difference == 0.0:
        return 0.0
    return difference / reference if reference else float("inf")


def _both_tiny(actual: Tensor, expected: Tensor) -> bool:
    return float((actual.double() - expected.double()).abs().max()) <= ABSOLUTE_TOLERANCE


def _table(rows: Sequence[ComparisonRow]) -> list[str]:
    if not rows:
        return []
    cells = [("quantity", "name", "grid", "rel. error", "ratio", "remark")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.6g}"
        cells.append((row.what, row.name, row.grid, f"{row.error:.2e}", ratio, row.remark))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[5]]).rstrip()
        for line in cells
    ]
