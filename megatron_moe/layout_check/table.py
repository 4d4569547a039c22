"""Compares the records of all ranks of a layout with a single-rank run's record (oracle) and explains differences.

The relative error of a tensor is max|difference| / max|reference|. If actual and expected values have a constant
ratio, a reduction is missing or was done twice. If the ranks' copies of a tensor differ, their reduction is missing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megatron_moe.config.param_meta import ParamBox
from megatron_moe.config.text import aligned_columns
from megatron_moe.layout_check.record import MetricKey, RankRecord, RecordedTensor
from megatron_moe.logs.metric_values import MetricValue
from megatron_moe.parallel.parameter import write_shard

RELATIVE_TOLERANCE = 1e-12
"""Maximum relative error (fp64). A different summation order causes about 4e-16, a typical fault more than 1e-3."""
ABSOLUTE_TOLERANCE = 1e-14
COPY_TOLERANCE = 1e-12
"""Maximum relative error between two ranks' copies of one tensor."""
CONSTANT = 1e-6
"""Tolerance for a constant ratio: maximum |actual - ratio * expected|, relative to the largest |ratio * expected|."""


@dataclass(frozen=True)
class ComparisonRow:
    """One row of the comparison table: a quantity, its relative error and a likely explanation."""

    what: str
    """Kind of quantity: gradient, weight, loss, norm, metric, tokens or expert bias."""
    name: str
    grid: str
    error: float
    """Relative error; inf if the actual or the expected value is missing or not finite."""
    ratio: float | None
    """actual / expected if the quantity differs and this ratio is the same for all elements, otherwise None."""
    remark: str
    bad: bool

    @property
    def ratio_text(self) -> str:
        return "" if self.ratio is None else f"{self.ratio:.6g}"


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a layout with the oracle, a single-rank run."""

    rows: tuple[ComparisonRow, ...]

    @property
    def failing_rows(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.bad]

    @property
    def all_equal(self) -> bool:
        return not self.failing_rows

    def verdict(self) -> str:
        """Summary of the comparison in one sentence."""
        largest = max((row.error for row in self.rows), default=0.0)
        if self.all_equal:
            return f"equal to one rank: {len(self.rows)} quantities, largest relative error {largest:.1e}"
        number = len(self.failing_rows)
        return f"NOT equal to one rank: {number} of {len(self.rows)} quantities differ, by up to {largest:.1e}"

    def text(self, *, every: bool = False) -> str:
        """Formats a table of the rows that differ (of all rows if `every`), followed by the verdict."""
        rows = list(self.rows) if every else self.failing_rows
        header = ("quantity", "name", "grid", "rel. error", "ratio", "remark")
        cells = [(row.what, row.name, row.grid, f"{row.error:.2e}", row.ratio_text, row.remark) for row in rows]
        return "\n".join([*(aligned_columns([header, *cells]) if rows else ()), self.verdict()])


def compare_runs(oracle: RankRecord, ranks: Sequence[RankRecord], *, rtol: float = RELATIVE_TOLERANCE) -> Comparison:
    """Compares the records of all ranks, given in rank order, with `oracle`, the record of the single-rank run. Values
    differ if their relative error exceeds `rtol`."""
    axes = {axis: 1 + max(record.coordinates[axis] for record in ranks) for axis in ranks[0].coordinates}
    expected, figures = _figures(oracle), [_figures(record) for record in ranks]
    for record, of_rank in zip(ranks, figures, strict=True):
        if record.coordinates["pp"] < axes["pp"] - 1:  # only the last pipeline rank has the loss
            of_rank["loss"] = {}
    rows = [
        *(
            row
            for what in expected
            for row in _figure_rows(what, expected[what], [each[what] for each in figures], rtol)
        ),
        *_tensor_rows("gradient", oracle.gradients, [record.gradients for record in ranks], axes, rtol),
        *_tensor_rows("weight", oracle.weights, [record.weights for record in ranks], axes, rtol),
        *_count_rows(oracle, ranks),
    ]
    return Comparison(tuple(rows))


def _figures(record: RankRecord) -> dict[str, dict[MetricKey, MetricValue]]:
    """Scalars of a record: kind ("loss", "norm" or "metric") -> (name with step number, layer index) -> value."""
    norms, metrics = enumerate(record.norms, 1), enumerate(record.metrics, 1)
    return {
        "loss": {(f"step {step}", None): loss for step, loss in enumerate(record.losses, 1)},
        "norm": {(f"{part}, step {step}", None): norm for step, each in norms for part, norm in each.items()},
        "metric": {(f"{name}, step {step}", layer): x for step, each in metrics for (name, layer), x in each.items()},
    }


def _figure_rows(
    what: str, oracle: Mapping[MetricKey, MetricValue], ranks: Sequence[Mapping[MetricKey, MetricValue]], rtol: float
) -> Iterator[ComparisonRow]:
    """Compares the ranks' scalars with the oracle's. Missing scalars and differences between ranks are errors."""
    for key, figure in oracle.items():
        name = key[0] if key[1] is None else f"{key[0]}, layer {key[1]}"
        wanted = torch.tensor(figure, dtype=torch.float64)
        known = [(rank, torch.tensor(each[key], dtype=torch.float64)) for rank, each in enumerate(ranks) if key in each]
        if not known:
            yield ComparisonRow(what, name, "", float("inf"), None, "no rank recorded this value", bad=True)
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
        if not parts:
            yield ComparisonRow(what, name, held.meta.grid, float("inf"), None, "no rank has this tensor", bad=True)
            continue
        whole, remark = assemble_tensor(parts, held.value)
        yield _row(what, name, held.meta.grid, whole, held.value, rtol, remark, axes)
    unknown = sorted({name for each in ranks for name in each} - set(oracle))
    for name in unknown:
        yield ComparisonRow(what, name, "", float("inf"), None, "the single-rank run has no such parameter", bad=True)


def assemble_tensor(parts: Sequence[tuple[int, RecordedTensor]], expected: Tensor) -> tuple[Tensor, str]:
    """Assembles a tensor from (rank, shard) pairs. Returns (tensor, remark on unequal copies or missing elements)."""
    first = parts[0][1]
    whole = torch.full(first.global_shape, float("nan"), dtype=first.value.dtype)
    copies: dict[tuple[ParamBox, ...], list[tuple[int, RecordedTensor]]] = {}
    for rank, held in parts:
        copies.setdefault(held.boxes, []).append((rank, held))
    remarks = []
    for boxes, group in copies.items():
        write_shard(whole, _merged([held.value for _, held in group]), boxes, first.meta)
        remarks.append(_about_copies(group, expected))
    if torch.isnan(whole).any():
        remarks.append(f"{int(torch.isnan(whole).sum())} elements exist on no rank")
    return whole, next((remark for remark in remarks if remark), "")


def _merged(copies: Sequence[Tensor]) -> Tensor:
    """Merges copies with missing elements (NaN): takes every element from the first copy in which it is not NaN."""
    merged = copies[0]
    for copy in copies[1:]:
        merged = torch.where(torch.isnan(merged), copy, merged)
    return merged


def _about_copies(group: Sequence[tuple[int, RecordedTensor]], expected: Tensor) -> str:
    """Remark about differences between the ranks' copies of one shard; empty if the copies are equal."""
    (first, reference), others = group[0], group[1:]
    apart = [rank for rank, held in others if _apart(held.value, reference.value)]
    if not apart:
        return ""
    text = f"copies on ranks {[rank for rank, _ in group]} differ (rank {apart[0]} from rank {first})"
    total, here = torch.zeros_like(expected), torch.zeros_like(expected, dtype=torch.bool)
    write_shard(total, torch.stack([held.value for _, held in group]).sum(dim=0), reference.boxes, reference.meta)
    write_shard(here, torch.ones_like(reference.value, dtype=torch.bool), reference.boxes, reference.meta)
    ratio = constant_ratio(total[here], expected[here])
    if ratio is None:
        return f"{text}: a reduction over these ranks is missing"
    times = "" if abs(ratio - 1) < CONSTANT else f" {ratio:.4g} times"
    return f"{text}; their sum is{times} the right value: a reduction over these ranks is missing"


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two copies differ in an element that is not NaN in both of them."""
    both = ~torch.isnan(one) & ~torch.isnan(other)
    return _error(one[both], other[both]) > COPY_TOLERANCE


def constant_ratio(actual: Tensor, expected: Tensor) -> float | None:
    """actual / expected if this ratio is the same for all elements, otherwise None."""
    actual, expected = actual.double(), expected.double()
    square = float((expected * expected).sum())
    if square == 0.0 or not torch.isfinite(actual).all():
        return None
    ratio = float((actual * expected).sum()) / square
    rest = float((actual - ratio * expected).abs().max())
    return ratio if rest <= CONSTANT * max(abs(ratio), CONSTANT) * float(expected.abs().max()) else None


def explain_ratio(ratio: float, axes: Mapping[str, int]) -> str:
    """Explains a ratio N as a doubled reduction over N ranks, and 1 / N as a missing one. Empty for other ratios."""
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
        remark = f"shape {tuple(actual.shape)}, the single-rank run has {tuple(expected.shape)}"
        return ComparisonRow(what, name, grid, float("inf"), None, remark, bad=True)
    error = _error(actual, expected)
    bad = bool(remark) or not error <= rtol and not _both_tiny(actual, expected)
    ratio = constant_ratio(actual, expected) if bad else None
    if not remark and ratio is not None and axes:
        remark = explain_ratio(ratio, axes)
    return ComparisonRow(what, name, grid, error, ratio, remark, bad)


def _count_rows(oracle: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[ComparisonRow]:
    """Compares token counts (summed over ranks) and expert biases, which must be equal bit by bit."""
    for layer, wanted in oracle.tokens.items():
        parts = [record.tokens[layer] for record in ranks if layer in record.tokens]
        total = torch.stack(parts).sum(dim=0) if parts else torch.zeros_like(wanted)
        remark = "" if torch.equal(total, wanted) else f"{total.tolist()}, the single-rank run has {wanted.tolist()}"
        yield ComparisonRow("tokens", f"layer {layer}", "", _error(total, wanted), None, remark, bad=bool(remark))
    for layer, bias in oracle.biases.items():
        held = [record.biases[layer] for record in ranks if layer in record.biases]
        right = bool(held) and all(torch.equal(each, bias) for each in held)
        error = max((_error(each, bias) for each in held), default=float("inf"))
        yield ComparisonRow(
            "expert bias", f"layer {layer}", "", error, None, "" if right else "the bits differ", bad=not right
        )


def _error(actual: Tensor, expected: Tensor) -> float:
    """Relative error: max|actual - expected| / max|expected|. inf if a difference is not finite."""
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


def summary(comparison: Comparison) -> str:
    """Formats one line per quantity, with its largest error over all layers and steps, followed by the verdict."""
    header = ("quantity", "name", "grid", "compared", "worst error", "ratio", "remark")
    lines = aligned_columns([header, *(_cells(key, rows) for key, rows in _kinds(comparison.rows))])
    return "\n".join([*lines, "", *_diagnosis(comparison), comparison.verdict()])


def _diagnosis(comparison: Comparison) -> Iterator[str]:
    """Yields lines about wrong gradients of the first step; these cause errors in all later results."""
    wrong = [row for row in comparison.failing_rows if row.what == "gradient"]
    if not wrong:
        return
    right = {_without_numbers(row.name) for row in comparison.rows if row.what == "gradient" and not row.bad}
    yield f"gradients of the first step are wrong in {len(wrong)} parameters, which affects all later results:"
    for (_, name, _), rows in _kinds(wrong):
        some = " (in some layers)" if name in right else ""
        yield f"  {name}{some}  {rows[0].remark}".rstrip()


def _kinds(rows: Sequence[ComparisonRow]) -> Iterator[tuple[tuple[str, str, str], list[ComparisonRow]]]:
    kinds: dict[tuple[str, str, str], list[ComparisonRow]] = {}
    for row in rows:
        kinds.setdefault((row.what, _without_numbers(row.name), row.grid), []).append(row)
    yield from kinds.items()


def _without_numbers(name: str) -> str:
    """Name without step and layer numbers; layer indices in parameter names become `*`."""
    name = re.sub(r",? ?(step|layer) \d+", "", name)
    return re.sub(r"\.\d+\.", ".*.", name) or "all"


def _cells(key: tuple[str, str, str], rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    worst = max(rows, key=lambda row: (row.bad, row.error))
    num_bad = sum(row.bad for row in rows)
    count = f"{len(rows)}" if not num_bad else f"{num_bad} of {len(rows)} WRONG"
    return (*key, count, f"{worst.error:.1e}", worst.ratio_text, worst.remark)
