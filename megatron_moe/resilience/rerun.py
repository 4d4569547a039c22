"""Attributes a suspicious step to data or hardware by comparing it with a rerun, as in Megatron's rerun state machine.

On intact hardware, a rerun of a step gives the same result. If the result differs, the error was transient, and the
ranks whose own losses differ are suspect. If the result is the same, the cause is the data, the model or a permanent
hardware fault. If a later launch computes the same values at this iteration, the cause is the data or the model,
provided that the launch ran on other hardware, which is not checked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import ExitCode, NumericsProblem, RunError
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_TOLERANCE = 1e-3
"""Maximum relative difference at which results count as equal, because the order of summation on a GPU may vary."""


class RerunProblem(RunError):
    """Raised after a failed step was rerun; `code` says whether the rerun indicates or excludes a hardware fault."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class RerunResult:
    """Sums of one rank's losses in a step (`first`) and in the rerun of the step (`rerun`)."""

    rank: int
    host: str
    device: str
    first: float
    rerun: float


@dataclass(frozen=True)
class RerunVerdict:
    """Conclusion from a step and its rerun."""

    kind: Literal["transient", "reproducible", "confirmed"]
    suspects: tuple[int, ...]
    """Ranks whose own losses differ in the rerun."""
    sentence: str
    """Conclusion as a clause to append to a message; starts with "; "."""

    def problem(self, sentence: str) -> RunError:
        """Exception that ends the run, with the message `sentence`. Its type and exit code depend on `self.kind`."""
        if self.kind == "transient":
            return RerunProblem(sentence, ExitCode.RERUN_DISAMBIGUATE)
        if self.kind == "confirmed":
            return RerunProblem(sentence, ExitCode.RERUN_FAILED)
        return NumericsProblem(sentence)


def is_equal(first: float, rerun: float) -> bool:
    """True if two results are equal within the tolerance or both non-finite."""
    if not (math.isfinite(first) and math.isfinite(rerun)):
        return math.isfinite(first) == math.isfinite(rerun)
    return abs(first - rerun) <= _TOLERANCE * max(abs(first), abs(rerun))


def compare_rerun(
    first: Mapping[str, float],
    rerun: Mapping[str, float],
    ranks: Sequence[RerunResult],
    earlier: Mapping[str, str] | None = None,
) -> RerunVerdict:
    """Compares a step with its rerun.

    Args:
        first, rerun: values of the step and of its rerun, reduced over all ranks, by name.
        ranks: losses of every rank in the step and in its rerun.
        earlier: name -> `repr` of the value in a previous launch that failed at this iteration; None means that there
        is none.
    """
    suspects = [each for each in ranks if not is_equal(each.first, each.rerun)]
    if suspects or any(not is_equal(first[name], rerun[name]) for name in rerun):
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in rerun.items())
        named = ", ".join(f"rank {each.rank} ({each.host}, {each.device})" for each in suspects)
        whom = f"suspect {named}" if suspects else "the losses of each rank are unchanged"
        text = f"; repeating the step gave a different result ({numbers}): {whom}"
        return RerunVerdict("transient", tuple(each.rank for each in suspects), text)
    text = "; repeating the step gave the same result"
    if earlier is not None and all(earlier.get(name) == repr(value) for name, value in first.items()):
        cause = "the data or the model, if the two launches ran on different hardware"
        return RerunVerdict("confirmed", (), f"{text}, as in an earlier launch: {cause}")
    return RerunVerdict("reproducible", (), f"{text}: the data, the model, or a permanent fault of this hardware")


class Repeatability:
    """Statistics of differences between steps and their reruns, accumulated on the device."""

    def __init__(self, device: torch.device) -> None:
        self._statistics = torch.zeros(3, device=device, dtype=torch.float64)
        """[number of steps, number of steps whose rerun differs in any bit, largest relative difference]."""

    def add(self, first: Tensor, rerun: Tensor) -> None:
        """Adds this rank's result vectors of a step and of its rerun."""
        difference = ((first - rerun).abs() / first.abs().clamp(min=1e-30)).nan_to_num(posinf=1.0).max()
        steps, differing, largest = self._statistics
        self._statistics = torch.stack([steps + 1, differing + (difference > 0), torch.maximum(largest, difference)])

    def log_line(self, context: ParallelContext) -> str | None:
        """Log line about reruns since the last call; None without reruns. Collective; synchronises with the device."""
        own = self._statistics.tolist()
        self._statistics.zero_()
        # collective over world: three numbers from every rank
        ranks = gather_objects(own, context.group("world"))
        if not ranks[0][0]:
            return None
        what = f"{ranks[0][0]:.0f} iterations were computed twice"
        odd = [rank for rank, statistics in enumerate(ranks) if statistics[1]]
        if not odd:
            return f"{what}: bitwise equal on all ranks"
        _, most, worst = (max(column) for column in zip(*ranks, strict=True))
        shown = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
        return f"{what}: up to {most:.0f} of them differ, relatively by at most {worst:.3g}, on ranks {shown}"
