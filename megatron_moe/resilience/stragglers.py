"""Straggler detection (`--log-straggler`): compares the time that ranks need for the same work.

The step time is the same on all ranks, because collectives synchronise them. Forward and backward of one attention
module and the wait for data are therefore timed separately. Device times use only events that have completed when the
report is made, which avoids synchronisation.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn

from megatron_moe.logs.timers import Timestamp
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_TIMES = ("forward", "backward", "data", "step")
_WHAT = "forward, backward: one attention module; data: wait for a batch; step: whole iteration"


class Stragglers:
    """Times attention, data loading and steps on this rank, and reports the times of all ranks. Construction and
    `report` are collective.

    Args:
        mixer: module whose forward and backward are timed, if any.
        num_named: number of slowest ranks to name (`--straggler-minmax-count`).
        flops: FLOPs of one step on one rank.
    """

    def __init__(self, mixer: nn.Module | None, context: ParallelContext, *, num_named: int, flops: float) -> None:
        self._context = context
        self._group = context.host_group()
        self._num_named = num_named
        self._flops = flops
        self._begun: list[Timestamp] = []
        self._spans: dict[str, list[tuple[Timestamp, Timestamp]]] = {"forward": [], "backward": []}
        self._seconds: dict[str, list[float]] = {"data": [], "step": []}
        if mixer is not None:
            mixer.register_forward_pre_hook(self._begin_forward, prepend=True)
            mixer.register_forward_hook(self._end_forward)

    def record_step_time(self, seconds: float) -> None:
        self._seconds["step"].append(seconds)

    def record_data_time(self, seconds: float) -> None:
        self._seconds["data"].append(seconds)

    def report(self) -> list[str]:
        """Log lines about all steps since the last report, identical on all ranks. Collective."""
        # collective over world, in host memory: a few hundred bytes per rank
        return straggler_lines(gather_objects(self._take(), self._group), self._num_named)

    def _take(self) -> dict[str, float]:
        """Clears the completed measurements of this rank; returns their medians in ms by name, and TFLOP/s."""
        milliseconds: dict[str, list[float]] = {}
        for name, spans in self._spans.items():
            milliseconds[name] = [end.seconds_since(begin) * 1e3 for begin, end in spans if end.has_completed()]
            self._spans[name] = [span for span in spans if not span[1].has_completed()]
        for name, seconds in self._seconds.items():
            milliseconds[name] = [each * 1e3 for each in seconds]
            self._seconds[name] = []
        medians = {name: median(values) for name, values in milliseconds.items() if values}
        if medians.get("step"):
            medians["TFLOP/s"] = self._flops / (medians["step"] / 1e3) / 1e12
        return medians

    def _begin_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._begun.append(Timestamp(self._context.device))

    def _end_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._spans["forward"].append((self._begun.pop(), Timestamp(self._context.device)))
        result, source = (value[0] if isinstance(value, tuple) else value for value in (output, inputs))
        if isinstance(result, Tensor) and result.requires_grad and isinstance(source, Tensor) and source.requires_grad:
            begun: list[Timestamp] = []
            result.register_hook(lambda gradient: begun.append(Timestamp(self._context.device)))
            source.register_hook(lambda gradient: self._end_backward(begun))

    def _end_backward(self, begun: list[Timestamp]) -> None:
        if begun:
            self._spans["backward"].append((begun.pop(), Timestamp(self._context.device)))


def straggler_lines(ranks: Sequence[Mapping[str, float]], num_named: int) -> list[str]:
    """Formats the report. `ranks`: for every rank, its medians by name."""
    lines = [f"straggler report of {len(ranks)} ranks, in ms ({_WHAT}):"]
    for name in (*_TIMES, "TFLOP/s"):
        values = {rank: medians[name] for rank, medians in enumerate(ranks) if name in medians}
        if not values:
            continue
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        middle = median(values.values())
        lines.append(
            f"    {name + ' ':.<10} min {values[least]:.2f} (rank {least}), median {middle:.2f}, "
            f"max {values[most]:.2f} (rank {most})"
        )
        if middle and name in ("forward", "data"):
            slowest = sorted(values, key=lambda rank: -values[rank])[:num_named]
            named = ", ".join(f"rank {rank} ({values[rank] / middle:.2f} x the median)" for rank in slowest)
            lines.append(f"    slowest by {name}: {named}")
    return lines
