"""Pipeline schedules as data, which can be printed, simulated and executed.

A schedule is a list of entries per pipeline rank. One builder covers all kinds:

- one stage: forward and backward of each microbatch;
- 1F1B (PipeDream-Flush, arXiv 2006.09503): warm-up forwards, alternating forwards and backwards, remaining backwards;
- interleaved (arXiv 2104.04473 section 2.2): the same over (microbatch, chunk) in Megatron's order;
- overlapped: each forward and backward of the steady phase form an `OverlappedPair` (`overlap.py`).

Sends and receives are explicit. The lists are projections of one global sequence in which each send is followed by its
receive (`transfers.py`). They therefore cannot deadlock, even with blocking sends, and messages between two ranks need
no tags: they are received in the order in which they were sent.
"""

from dataclasses import dataclass

from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair, Schedule
from megatron_moe.pipeline.layout import StageMap
from megatron_moe.pipeline.transfers import with_transfers


class ScheduleError(ValueError):
    """The sizes do not allow a schedule."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Parameters of a schedule."""

    num_microbatches: int
    pp: int = 1
    vpp: int = 1
    """Model chunks per rank (`StageMap`)."""
    group_size: int | None = None
    """Consecutive microbatches per chunk; None: pp. Used if vpp > 1."""
    overlap: bool = False
    """Forms pairs in the steady phase, to hide expert communication."""
    split_backward: bool = False
    """Computes and sends the input gradient before the weight gradients."""
    forward_only: bool = False
    """Evaluation: no backwards."""

    @property
    def group(self) -> int:
        return self.pp if self.group_size is None or self.vpp == 1 else self.group_size

    @property
    def stages(self) -> StageMap:
        return StageMap(self.pp, self.vpp)


def build_schedule(config: ScheduleConfig) -> Schedule:
    """Builds the entries of every pipeline rank. Raises ScheduleError for invalid sizes."""
    check_schedule(config)
    return with_transfers(config.stages, [computations(config, rank) for rank in range(config.pp)])


def check_schedule(config: ScheduleConfig) -> None:
    """Raises ScheduleError for invalid sizes, the same as in Megatron."""
    if min(config.num_microbatches, config.pp, config.vpp, config.group) < 1:
        raise ScheduleError(
            f"{config.num_microbatches} microbatches, {config.pp} pipeline ranks, {config.vpp} chunks per rank, "
            f"groups of "
            f"{config.group}: every number must be at least 1"
        )
    if config.vpp == 1:
        return
    if config.pp == 1:
        raise ScheduleError(f"{config.vpp} virtual stages per rank need at least 2 pipeline ranks, not 1")
    if not config.pp <= config.group <= config.num_microbatches:
        raise ScheduleError(
            f"groups of {config.group} microbatches must be at least as large as the pipeline ({config.pp} ranks) "
            f"and at "
            f"most the {config.num_microbatches} microbatches of a step, when a rank has {config.vpp} virtual stages"
        )
    remainder = config.num_microbatches % config.group
    if 0 < remainder < config.pp:
        raise ScheduleError(
            f"{config.num_microbatches} microbatches leave {remainder} after groups of {config.group}; with "
            f"{config.vpp} "
            f"virtual stages the rest must be 0 or at least the {config.pp} pipeline ranks"
        )


def num_warmup(config: ScheduleConfig, rank: int) -> int:
    """Number of (microbatch, chunk) forwards before the steady phase."""
    total = config.num_microbatches * config.vpp
    if config.forward_only:
        return total
    later_ranks = config.pp - rank - 1
    if config.vpp == 1 and not config.overlap:
        return min(later_ranks, total)
    return min(2 * later_ranks + (config.vpp - 1) * config.group + config.overlap, total)


def chunk_order(config: ScheduleConfig) -> list[tuple[int, int]]:
    """(microbatch, chunk) of a rank's forwards in order: group by group of microbatches, chunk by chunk.

    Backwards have the same order with the chunks reversed.
    """
    order = []
    for start in range(0, config.num_microbatches, config.group):
        group = range(start, min(start + config.group, config.num_microbatches))
        order += [(microbatch, chunk) for chunk in range(config.vpp) for microbatch in group]
    return order


def computations(config: ScheduleConfig, rank: int) -> list[Entry]:
    """Computations of a rank in order, without sends and receives."""
    order = chunk_order(config)
    forwards = [Action("forward", microbatch, chunk) for microbatch, chunk in order]
    if config.forward_only:
        return list(forwards)
    backwards = [Action("backward", microbatch, config.vpp - 1 - chunk) for microbatch, chunk in order]
    warmup = num_warmup(config, rank)
    steady = len(order) - warmup
    entries: list[Entry] = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        entries += [OverlappedPair(forward, backward)] if config.overlap else [forward, *_backward(backward, config)]
    for backward in backwards[steady:]:
        entries += _backward(backward, config)
    return entries


def _backward(backward: Action, config: ScheduleConfig) -> list[Action]:
    # with one pipeline rank, no other rank needs the input gradient early
    if not config.split_backward or config.pp == 1:
        return [backward]
    at = (backward.microbatch, backward.chunk)
    return [Action("backward_input", *at), Action("backward_weight", *at)]
