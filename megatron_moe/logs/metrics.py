"""Metrics recorded inside modules and reduced once per log interval.

Recording adds to tensors on the device and never waits for the host. `take` makes one collective per kind of
reduction and one host read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.parallel.collectives import all_reduce_, gather_objects
from megatron_moe.parallel.context import ParallelContext

Reduction = Literal["mean", "sum", "max"]
Figure = float | list[float]
"""What a metric reads: a number, or one number per element of a recorded vector (e.g. per expert)."""
Key = tuple[str, int | None]
"""(name, layer)."""


Fold = Callable[["MetricAccumulator", dict[int, int], Tensor], None]
"""Records figures of rows [n, ...], of which so many belong to each layer, one layer behind the other."""

_ROWS_AT_A_TIME = 128


@dataclass
class _Entry:
    reduction: Reduction
    value: Tensor
    calls: int = 0
    """Calls without a count of their own: each counts 1."""
    counted: Tensor | None = None
    """Sum of the counts of the others."""

    @property
    def count(self) -> Tensor:
        """fp64 scalar: what the value is divided by for a mean."""
        calls = torch.full((), float(self.calls), dtype=torch.float64, device=self.value.device)
        return calls if self.counted is None else calls + self.counted


@dataclass
class _Rows:
    """What waits to be folded."""

    fold: Fold
    of_layers: dict[int, list[Tensor]] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class _Total:
    """An entry over all ranks, on the host."""

    reduction: Reduction
    figure: Figure


@dataclass(frozen=True)
class Metric:
    """One reduced metric."""

    value: Figure
    """Over all layers that recorded it: their mean, or their largest value when the reduction is "max"."""
    layers: dict[int, Figure] = field(default_factory=dict)
    """By global layer index; empty for a metric recorded without a layer."""


@dataclass
class MetricAccumulator:
    """Sums and counts of named metrics, each optionally per layer."""

    entries: dict[Key, _Entry] = field(default_factory=dict)
    _waiting: dict[str, _Rows] = field(default_factory=dict)

    def record(
        self,
        name: str,
        value: Tensor,
        *,
        layer: int | None = None,
        count: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        """Adds `value` (a scalar or a vector) under `name`.

        With "mean" the reported figure is sum of values / sum of counts (count: number of calls unless given); with
        "sum" and "max" the sum and the largest value over microbatches and the ranks of a pipeline stage. So what
        tensor or context parallel ranks all know enters a mean, and what each knows a part of may enter a sum.
        """
        value = value.detach()
        entry = self.entries.get((name, layer))
        if entry is None:
            entry = _Entry(reduction, torch.empty_like(value, dtype=torch.float64).copy_(value))
            self.entries[name, layer] = entry
        else:
            _check_like(entry, name, value, reduction)
            _combine_(entry, value)
        if count is None:
            entry.calls += 1
        else:
            counted = count.detach().double()
            entry.counted = counted.clone() if entry.counted is None else entry.counted.add_(counted)

    def collect(self, name: str, layer: int, row: Tensor, fold: Fold) -> None:
        """Keeps `row`, which must not change afterwards, until many can be worked out at once: `fold` then records
        them. Launching a dozen small kernels per layer and microbatch would cost more than what they compute."""
        waiting = self._waiting.setdefault(name, _Rows(fold))
        waiting.of_layers.setdefault(layer, []).append(row.detach())
        waiting.number += 1
        if waiting.number >= _ROWS_AT_A_TIME:
            self._fold()

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            numbers = {layer: len(rows) for layer, rows in each.of_layers.items()}
            each.fold(self, numbers, torch.stack([row for rows in each.of_layers.values() for row in rows]))

    def cut(self) -> "MetricAccumulator":
        """Hands over everything recorded so far, to be read later, and starts anew. Waits for nothing."""
        self._fold()
        entries, self.entries = self.entries, {}
        return MetricAccumulator(entries)

    def take(self, context: ParallelContext) -> dict[str, Metric]:
        """Reduces over the ranks of the pipeline stage, reads everything at once, gathers all stages, and starts anew.

        Every rank of a stage must have recorded the same names with the same shapes, in any order. What has no layer
        must be recorded on one stage only.
        """
        self._fold()
        entries, self.entries = self.entries, {}
        # pp: the figures of every stage, a few kB for a hundred layers
        stages = gather_objects(_totals(entries, context), context.group("pp"))
        totals = {key: total for stage in stages for key, total in stage.items()}
        assert len(totals) == sum(map(len, stages)), (
            f"recorded on several stages: {[sorted(stage) for stage in stages]}"
        )
        return {name: _metric(name, totals) for name in dict.fromkeys(name for name, _ in totals)}


def _check_like(entry: _Entry, name: str, value: Tensor, reduction: Reduction) -> None:
    assert entry.reduction == reduction, f"{name} was recorded as {entry.reduction}, now as {reduction}"
    assert entry.value.shape == value.shape, f"{name} had shape {tuple(entry.value.shape)}, now {tuple(value.shape)}"


def _combine_(entry: _Entry, value: Tensor) -> None:
    """Into the fp64 value, by one kernel whatever the dtype of `value`."""
    if entry.reduction == "max":
        torch.maximum(entry.value, value.double(), out=entry.value)
    else:
        entry.value.add_(value)


def _totals(entries: Mapping[Key, _Entry], context: ParallelContext) -> dict[Key, _Total]:
    """Every entry over the ranks of this stage, in the order of recording."""
    keys = sorted(entries, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    added = [key for key in keys if entries[key].reduction != "max"]
    largest = [key for key in keys if entries[key].reduction == "max"]
    sums = _flat([tensor for key in added for tensor in (entries[key].value, entries[key].count)])
    maxima = _flat([entries[key].value for key in largest])
    figures = _reduce_and_read(sums, maxima, context)
    totals: dict[Key, Figure] = {}
    for key in added:
        value, count = _next_figure(figures, entries[key].value), figures.pop()
        totals[key] = _divide(value, count) if entries[key].reduction == "mean" else value
    for key in largest:
        totals[key] = _next_figure(figures, entries[key].value)
    return {key: _Total(entry.reduction, totals[key]) for key, entry in entries.items()}


def _flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """All elements in one fp64 vector, so that one collective and one copy carry them."""
    return torch.cat([tensor.double().flatten() for tensor in tensors]) if tensors else None


def _reduce_and_read(sums: Tensor | None, maxima: Tensor | None, context: ParallelContext) -> list[float]:
    """All reduced elements, last first, so that they can be popped in order.

    Two all-reduces over "tp_dp_cp" (no gradient flows), a few kB for a hundred layers; one copy to the host.
    """
    group = context.group("tp_dp_cp")
    reduced = []
    if sums is not None:
        reduced.append(all_reduce_(sums, group, "sum"))
    if maxima is not None:
        reduced.append(all_reduce_(maxima, group, "max"))
    return torch.cat(reduced).tolist()[::-1] if reduced else []


def _next_figure(figures: list[float], like: Tensor) -> Figure:
    """Takes the figure of one entry from the end of `figures`."""
    if like.dim() == 0:
        return figures.pop()
    return [figures.pop() for _ in range(like.numel())]


def _divide(value: Figure, count: float) -> Figure:
    """value / count; not-a-number when nothing was counted."""
    if isinstance(value, list):
        return [element / count if count else float("nan") for element in value]
    return value / count if count else float("nan")


def _metric(name: str, totals: Mapping[Key, _Total]) -> Metric:
    """Collects the layers of one metric and combines them."""
    if (name, None) in totals:
        return Metric(totals[name, None].figure)
    found = sorted((layer, key) for key in totals if key[0] == name and (layer := key[1]) is not None)
    layers = {layer: totals[key].figure for layer, key in found}
    largest = totals[found[0][1]].reduction == "max"
    return Metric(_over_layers(list(layers.values()), largest), layers)


def _over_layers(figures: list[Figure], largest: bool) -> Figure:
    """Mean or maximum over layers, element by element for vectors of equal length."""
    if isinstance(figures[0], list):
        columns = zip(*(figure for figure in figures if isinstance(figure, list)), strict=True)
        return [max(column) if largest else sum(column) / len(figures) for column in columns]
    numbers = [figure for figure in figures if not isinstance(figure, list)]
    return max(numbers) if largest else sum(numbers) / len(numbers)
