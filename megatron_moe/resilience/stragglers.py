"""Slow ranks: what every rank took for the same piece of work, side by side (`--log-straggler`).

A step takes equally long on all ranks, because they wait for each other. So one piece without the others is timed: the
attention of the first layer that a rank holds, forwards and backwards, and the wait for data. Nothing waits for the
device: of its events only those count that have come when the report is made.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn

from megatron_moe.logs.timers import Moment
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_TIMES = ("forward", "backward", "data", "step")
_WHAT = "forward: of one attention; backward: of the same; data: wait for a batch; step: all of it"


class Stragglers:
    """Watches one rank, and makes the report of all. All ranks make it together.

    Args:
        num_named: how many of the slowest ranks are named (`--straggler-minmax-count`).
        flops: of a step, of one rank.
    """

    def __init__(self, model: nn.Module, context: ParallelContext, *, num_named: int, flops: float) -> None:
        self._context = context
        self._group = context.host_group()
        self._num_named = num_named
        self._flops = flops
        self._begun: list[Moment] = []
        self._spans: dict[str, list[tuple[Moment, Moment]]] = {"forward": [], "backward": []}
        self._seconds: dict[str, list[float]] = {"data": [], "step": []}
        mixer = _first_mixer(model)
        if mixer is not None:
            mixer.register_forward_pre_hook(self._forward_begins, prepend=True)
            mixer.register_forward_hook(self._forward_ends)

    def step_took(self, seconds: float) -> None:
        self._seconds["step"].append(seconds)

    def data_took(self, seconds: float) -> None:
        self._seconds["data"].append(seconds)

    def report(self) -> list[str]:
        """Lines about all steps since the last report; every rank calls it, and all get the same."""
        # host: some hundred bytes per rank
        return straggler_lines(gather_objects(self._take(), self._group), self._num_named)

    def _take(self) -> dict[str, float]:
        """Median milliseconds of this rank, and its TFLOP/s, by name; what has not happened is missing."""
        milliseconds: dict[str, list[float]] = {}
        for name, spans in self._spans.items():
            milliseconds[name] = [end.seconds_since(begin) * 1e3 for begin, end in spans if end.has_come()]
            self._spans[name] = [span for span in spans if not span[1].has_come()]
        for name, seconds in self._seconds.items():
            milliseconds[name] = [each * 1e3 for each in seconds]
            self._seconds[name] = []
        figures = {name: median(values) for name, values in milliseconds.items() if values}
        if figures.get("step"):
            figures["TFLOP/s"] = self._flops / (figures["step"] / 1e3) / 1e12
        return figures

    def _forward_begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._begun.append(Moment(self._context.device))

    def _forward_ends(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._spans["forward"].append((self._begun.pop(), Moment(self._context.device)))
        result, source = (value[0] if isinstance(value, tuple) else value for value in (output, inputs))
        if isinstance(result, Tensor) and result.requires_grad and isinstance(source, Tensor) and source.requires_grad:
            begun: list[Moment] = []
            result.register_hook(lambda gradient: begun.append(Moment(self._context.device)))
            source.register_hook(lambda gradient: self._backward_ends(begun))

    def _backward_ends(self, begun: list[Moment]) -> None:
        if begun:
            self._spans["backward"].append((begun.pop(), Moment(self._context.device)))


def straggler_lines(ranks: Sequence[Mapping[str, float]], num_named: int) -> list[str]:
    """The report: `ranks` has the figures of every rank, by name."""
    lines = [f"straggler report of {len(ranks)} ranks, in ms ({_WHAT}):"]
    for name in (*_TIMES, "TFLOP/s"):
        values = {rank: figures[name] for rank, figures in enumerate(ranks) if name in figures}
        if values:
            least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            lines.append(
                f"    {name + ' ':.<10} min {values[least]:.2f} (rank {least}), median {median(values.values()):.2f}, "
                f"max {values[most]:.2f} (rank {most})"
            )
    for name in ("forward", "data"):
        slowest = _slowest(ranks, name)[:num_named]
        if slowest:
            named = ", ".join(f"rank {rank} ({ratio:.2f} x the median)" for rank, ratio in slowest)
            lines.append(f"    slowest by {name}: {named}")
    return lines


def _slowest(ranks: Sequence[Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    """Every rank with its share of the median, the slowest first; none without a median."""
    values = {rank: figures[name] for rank, figures in enumerate(ranks) if name in figures}
    middle = median(values.values()) if values else 0.0
    return sorted(((rank, value / middle) for rank, value in values.items() if middle), key=lambda pair: -pair[1])


def _first_mixer(model: nn.Module) -> nn.Module | None:
    """The attention of the first layer that this rank holds."""
    for name, module in model.named_modules():
        if name.endswith(".self_attention"):
            return module
    return None
