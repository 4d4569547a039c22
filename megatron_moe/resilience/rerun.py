"""A suspicious step is computed twice: is it the numbers, or the hardware? As Megatron's rerun engine asks.

On one device the same step gives the same result. Where the second try differs, something went wrong once, and the rank
whose own loss differs is suspect. Where it does not, it is the data, the model, or hardware that errs every time: the
next start, if it meets the very same numbers at the same iteration, tells these from each other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import (
    ExitCode,
    NumericsProblem,
    RunError,
)
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_TOLERANCE = 1e-3
"""Relative: what the order of sums on a GPU may move."""


class RerunProblem(RunError):
    """A step whose repetition says something about the hardware."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class RerunResult:
    """What one rank computed, and computed again: the sum of its own losses."""

    rank: int
    host: str
    device: str
    first: float
    again: float


@dataclass(frozen=True)
class RerunVerdict:
    """What two tries of a step say."""

    kind: Literal["transient", "reproducible", "confirmed"]
    suspects: tuple[int, ...]
    """Ranks whose own losses differ between the two."""
    sentence: str
    """Begins with "; "."""

    def problem(self, sentence: str) -> RunError:
        """What ends the run, with this text."""
        if self.kind == "transient":
            return RerunProblem(sentence, ExitCode.RERUN_DISAMBIGUATE)
        if self.kind == "confirmed":
            return RerunProblem(sentence, ExitCode.RERUN_FAILED)
        return NumericsProblem(sentence)


def same(first: float, again: float) -> bool:
    """Is it one result, but for the order of sums? What is not finite equals what is not finite."""
    if not (math.isfinite(first) and math.isfinite(again)):
        return math.isfinite(first) == math.isfinite(again)
    return abs(first - again) <= _TOLERANCE * max(abs(first), abs(again))


def judge(
    first: Mapping[str, float],
    again: Mapping[str, float],
    ranks: Sequence[RerunResult],
    earlier: Mapping[str, str] | None = None,
) -> RerunVerdict:
    """The verdict over two tries.

    Args:
        first, again: numbers over all ranks, by name.
        ranks: numbers of every rank alone.
        earlier: texts of `first` in an earlier start of the run that stopped at this iteration, if one did.
    """
    suspects = [each for each in ranks if not same(each.first, each.again)]
    names = tuple(each.rank for each in suspects)
    if suspects or any(not same(first[name], again[name]) for name in again):
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in again.items())
        whose = ", ".join(f"rank {each.rank} ({each.host}, {each.device})" for each in suspects)
        whom = f"suspect {whose}" if suspects else "the losses of each rank alone are the same"
        return RerunVerdict("transient", names, f"; computed again it is another result ({numbers}): {whom}")
    if earlier is not None and all(earlier.get(name) == repr(value) for name, value in first.items()):
        text = "; computed again it is the same, as in an earlier start: not the hardware, but the data or the model"
        return RerunVerdict("confirmed", (), text)
    text = "; computed again it is the same: the data, the model, or a lasting fault of this hardware"
    return RerunVerdict("reproducible", (), text)


class Repeatability:
    """How far steps that are all computed twice differ, kept on the device until it is reported."""

    def __init__(self, device: torch.device) -> None:
        self._figures = torch.zeros(3, device=device, dtype=torch.float64)
        """Steps, those whose two results differ in a bit, the largest relative difference."""

    def add(self, first: Tensor, again: Tensor) -> None:
        """Takes the two results of a step, as vectors of this rank."""
        difference = ((first - again).abs() / first.abs().clamp(min=1e-30)).nan_to_num(posinf=1.0).max()
        steps, differing, largest = self._figures
        self._figures = torch.stack([steps + 1, differing + (difference > 0), torch.maximum(largest, difference)])

    def line(self, context: ParallelContext) -> str | None:
        """A sentence about all ranks since the last one; every rank calls it. Waits for the device."""
        steps, differing, largest = self._figures.tolist()
        self._figures.zero_()
        # world: three numbers per rank
        ranks = gather_objects((steps, differing, largest), context.group("world"))
        if not ranks[0][0]:
            return None
        odd = [rank for rank, figures in enumerate(ranks) if figures[1]]
        worst = max(figures[2] for figures in ranks)
        what = f"{ranks[0][0]:.0f} iterations were computed twice"
        if not odd:
            return f"{what}: the same bits on all ranks"
        shown = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
        most = max(figures[1] for figures in ranks)
        return f"{what}: up to {most:.0f} of them differ, relatively by at most {worst:.3g}, on ranks {shown}"
