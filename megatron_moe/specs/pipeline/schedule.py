"""Schedules as data: what each pipeline rank does, in which order. Pure, so that it can be printed and simulated.

A schedule is one list of entries per pipeline rank. One builder makes every schedule:

- one stage: the forward and then the backward of every microbatch;
- 1F1B (PipeDream-Flush, arXiv 2006.09503): warm-up forwards, then one forward and one backward in turn, then the rest;
- interleaved (arXiv 2104.04473 section 2.2): a rank has several chunks of the model and the same pattern runs over
  (microbatch, chunk), in Megatron's order;
- overlapped: forward and backward of the steady phase become one `Pair`, whose nodes interleave (`slots.py`).

Sends and receives are explicit. The lists are projections of one global sequence in which every send stands beside its
receive (`transfers.py`); so they cannot deadlock, not even when a send waits for its receive, and a pair of ranks needs
no tags: messages from one rank to another arrive in the order in which they are awaited.
"""

from dataclasses import dataclass

from megatron_moe.specs.pipeline.actions import Action, Entry, Pair, Schedule
from megatron_moe.specs.pipeline.stages import StageMap
from megatron_moe.specs.pipeline.transfers import with_transfers


class ScheduleError(ValueError):
    """No schedule with these sizes."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """What a schedule depends on."""

    num_microbatches: int
    pp: int = 1
    vpp: int = 1
    """Model chunks of a rank (`StageMap`)."""
    group_size: int | None = None
    """Microbatches that a chunk takes in a row; None: pp. Matters when vpp > 1."""
    overlap: bool = False
    """Steady phase in pairs, to hide expert communication."""
    split_backward: bool = False
    """Send the gradient of the input before the gradients of the weights are computed."""
    forward_only: bool = False
    """Evaluation."""

    @property
    def group(self) -> int:
        return self.pp if self.group_size is None or self.vpp == 1 else self.group_size

    @property
    def stages(self) -> StageMap:
        return StageMap(self.pp, self.vpp)


def build_schedule(spec: ScheduleSpec) -> Schedule:
    """The entries of every pipeline rank. Raises ScheduleError for sizes that do not fit."""
    check_schedule(spec)
    return with_transfers(spec.stages, [computations(spec, rank) for rank in range(spec.pp)])


def check_schedule(spec: ScheduleSpec) -> None:
    """Raises ScheduleError for sizes that do not fit; Megatron refuses the same ones."""
    if min(spec.num_microbatches, spec.pp, spec.vpp, spec.group) < 1:
        raise ScheduleError(
            f"{spec.num_microbatches} microbatches, {spec.pp} pipeline ranks, {spec.vpp} chunks per rank, groups of "
            f"{spec.group}: every number must be at least 1"
        )
    if spec.vpp == 1:
        return
    if spec.pp == 1:
        raise ScheduleError(f"{spec.vpp} virtual stages per rank need at least 2 pipeline ranks, not 1")
    if not spec.pp <= spec.group <= spec.num_microbatches:
        raise ScheduleError(
            f"groups of {spec.group} microbatches must be at least as large as the pipeline ({spec.pp} ranks) and at "
            f"most the {spec.num_microbatches} microbatches of a step, when a rank has {spec.vpp} virtual stages"
        )
    remainder = spec.num_microbatches % spec.group
    if 0 < remainder < spec.pp:
        raise ScheduleError(
            f"{spec.num_microbatches} microbatches leave {remainder} after groups of {spec.group}; with {spec.vpp} "
            f"virtual stages the rest must be 0 or at least the {spec.pp} pipeline ranks"
        )


def num_warmup(spec: ScheduleSpec, rank: int) -> int:
    """Forwards, counted in (microbatch, chunk), before the first backward is due."""
    total = spec.num_microbatches * spec.vpp
    if spec.forward_only:
        return total
    behind = spec.pp - rank - 1
    if spec.vpp == 1 and not spec.overlap:
        return min(behind, total)
    return min(2 * behind + (spec.vpp - 1) * spec.group + spec.overlap, total)


def chunk_order(spec: ScheduleSpec) -> list[tuple[int, int]]:
    """(microbatch, chunk) of every forward of a rank: each group of microbatches passes all chunks before the next.

    Backwards take the same order with the chunks reversed.
    """
    order = []
    for start in range(0, spec.num_microbatches, spec.group):
        group = range(start, min(start + spec.group, spec.num_microbatches))
        order += [(microbatch, chunk) for chunk in range(spec.vpp) for microbatch in group]
    return order


def computations(spec: ScheduleSpec, rank: int) -> list[Entry]:
    """What a rank computes, in order, without sends and receives."""
    order = chunk_order(spec)
    forwards = [Action("forward", microbatch, chunk) for microbatch, chunk in order]
    if spec.forward_only:
        return list(forwards)
    backwards = [Action("backward", microbatch, spec.vpp - 1 - chunk) for microbatch, chunk in order]
    warmup = num_warmup(spec, rank)
    steady = len(order) - warmup
    entries: list[Entry] = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        entries += [Pair(forward, backward)] if spec.overlap else [forward, *_backward(backward, spec)]
    for backward in backwards[steady:]:
        entries += _backward(backward, spec)
    return entries


def _backward(backward: Action, spec: ScheduleSpec) -> list[Action]:
    # with one pipeline rank nobody waits for the gradient of the input
    if not spec.split_backward or spec.pp == 1:
        return [backward]
    at = (backward.microbatch, backward.chunk)
    return [Action("backward_input", *at), Action("backward_weight", *at)]
