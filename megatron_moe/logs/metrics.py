"""Metrics that modules record on the device. They are reduced over ranks once per log interval.

Recording adds to tensors on the device without synchronisation. `MetricAccumulator.reduce` runs one all-reduce for sums
and one for maxima, and copies the results to the host once.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.logs.metric_values import Metric
from megatron_moe.parallel.collectives import all_reduce_, gather_objects
from megatron_moe.parallel.context import ParallelContext

Reduction = Literal["mean", "sum", "max"]
Key = tuple[str, int | None]
"""(metric name, global layer index). The layer index is None for metrics that are not per layer."""
Fold = Callable[["MetricAccumulator", dict[int, int], Tensor], None]
"""Function that records metrics of rows. Arguments: accumulator, layer -> number of rows, rows [n, ...] by layer."""

_ROWS_AT_A_TIME = 128


@dataclass
class _MetricEntry:
    reduction: Reduction
    value: Tensor
    calls: int = 0
    """Number of `record` calls without the argument `count`; each adds 1 to the divisor of a mean."""
    counted: Tensor | None = None
    """Sum of the `count` arguments on the device; None if no call had one."""

    @property
    def count(self) -> Tensor:
        """Divisor of the mean: fp64 scalar tensor on the device of `value`."""
        calls = torch.full((), float(self.calls), dtype=torch.float64, device=self.value.device)
        return calls if self.counted is None else calls + self.counted


@dataclass
class _PendingRows:
    """Rows that `MetricAccumulator.collect` has stored for one metric name and that `fold` has not processed yet."""

    fold: Fold
    of_layers: dict[int, list[Tensor]] = field(default_factory=dict)
    number: int = 0


_Total = tuple[Reduction, Tensor]
"""(reduction of an entry, its value over all ranks of a pipeline stage as fp64 tensor in host memory)."""


@dataclass
class MetricAccumulator:
    """Accumulates sums, maxima and counts of named metrics on the device; a metric may have values per layer."""

    entries: dict[Key, _MetricEntry] = field(default_factory=dict)
    _pending: dict[str, _PendingRows] = field(default_factory=dict)
    trace_routing: Callable[[int, Tensor], None] | None = None
    """Function (layer, expert ids [T, K]) that traces one call of the layer's router. None if routing is not traced."""

    def record(
        self,
        name: str,
        value: Tensor,
        *,
        layer: int | None = None,
        count: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        """Records `value` (a scalar or a vector) of the metric `name`.

        The metric is reduced over microbatches and the ranks of a pipeline stage. "mean" divides the sum of values by
        the sum of `count` (default: 1 per call). Values that are replicated over tensor- or context-parallel ranks need
        "mean" or "max", because "sum" would add every copy.
        """
        value = value.detach()
        entry = self.entries.get((name, layer))
        if entry is None:
            entry = _MetricEntry(reduction, torch.empty_like(value, dtype=torch.float64).copy_(value))
            self.entries[name, layer] = entry
        else:
            recorded, given = (entry.reduction, entry.value.shape), (reduction, value.shape)
            assert recorded == given, f"{name} was recorded as {recorded}, now as {given}"
            if reduction == "max":
                torch.maximum(entry.value, value.double(), out=entry.value)
            else:
                entry.value.add_(value)  # one kernel for any dtype of `value`
        if count is None:
            entry.calls += 1
        else:
            counted = count.detach().double()
            entry.counted = counted.clone() if entry.counted is None else entry.counted.add_(counted)

    def collect(self, name: str, layer: int, row: Tensor, fold: Fold) -> None:
        """Stores `row`. Once 128 rows are stored, `fold` records the metrics of all rows at once, which avoids a dozen
        small kernels per layer and microbatch. The caller must not modify `row` afterwards."""
        pending = self._pending.setdefault(name, _PendingRows(fold))
        pending.of_layers.setdefault(layer, []).append(row.detach())
        pending.number += 1
        if pending.number >= _ROWS_AT_A_TIME:
            self._fold()

    def _fold(self) -> None:
        pending, self._pending = self._pending, {}
        for each in pending.values():
            numbers = {layer: len(rows) for layer, rows in each.of_layers.items()}
            each.fold(self, numbers, torch.stack([row for rows in each.of_layers.values() for row in rows]))

    def take_all(self) -> "MetricAccumulator":
        """Returns a new accumulator with everything recorded so far, and resets this one. Does not synchronise."""
        self._fold()
        entries, self.entries = self.entries, {}
        return MetricAccumulator(entries)

    def reduce(self, context: ParallelContext) -> dict[str, Metric]:
        """Returns all metrics by name and resets the accumulator. Collective over all ranks.

        All ranks of a pipeline stage must have recorded the same names with the same shapes, in any order. A metric
        without a layer must be recorded on one stage only.
        """
        self._fold()
        entries, self.entries = self.entries, {}
        # collective over pp: the totals of every stage, a few kB for a hundred layers
        stages = gather_objects(_reduced(entries, context), context.group("pp"))
        totals = {key: total for stage in stages for key, total in stage.items()}
        assert len(totals) == sum(map(len, stages)), (
            f"recorded on several stages: {[sorted(stage) for stage in stages]}"
        )
        return {name: _metric(name, totals) for name in dict.fromkeys(name for name, _ in totals)}


def _reduced(entries: Mapping[Key, _MetricEntry], context: ParallelContext) -> dict[Key, _Total]:
    """Reduces every entry over the ranks of this pipeline stage; returns the totals in the order of recording.

    Runs at most two all-reduces over "tp_dp_cp", of a few kB for a hundred layers, and one copy to the host.
    """
    keys = sorted(entries, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    added = [key for key in keys if entries[key].reduction != "max"]
    largest = [key for key in keys if entries[key].reduction == "max"]
    sums = [tensor for key in added for tensor in (entries[key].value, entries[key].count)]
    maxima = [entries[key].value for key in largest]
    group, reduced = context.group("tp_dp_cp"), []
    if sums:
        reduced.append(all_reduce_(_flat(sums), group, "sum"))
    if maxima:
        reduced.append(all_reduce_(_flat(maxima), group, "max"))
    shapes = [tensor.shape for tensor in (*sums, *maxima)]
    flat = torch.cat(reduced).cpu().split([shape.numel() for shape in shapes]) if reduced else ()
    values = iter(value.view(shape) for value, shape in zip(flat, shapes, strict=True))
    totals: dict[Key, _Total] = {}
    for key in (*added, *largest):
        reduction, value = entries[key].reduction, next(values)
        count = 1.0 if reduction == "max" else float(next(values))
        if reduction == "mean":
            value = value / count if count else torch.full_like(value, math.nan)
        totals[key] = reduction, value
    return {key: totals[key] for key in entries}


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _metric(name: str, totals: Mapping[Key, _Total]) -> Metric:
    """Builds the metric `name`: its values per layer, and their mean (or their maximum if the reduction is "max")."""
    if (name, None) in totals:
        return Metric(totals[name, None][1].tolist())
    recorded = {layer: total for (other, layer), total in totals.items() if other == name and layer is not None}
    reduction, _ = next(iter(recorded.values()))
    layers = {layer: recorded[layer][1] for layer in sorted(recorded)}
    values = list(layers.values())
    whole = reduce(torch.maximum, values) if reduction == "max" else reduce(torch.add, values) / len(values)
    return Metric(whole.tolist(), {layer: value.tolist() for layer, value in layers.items()})
