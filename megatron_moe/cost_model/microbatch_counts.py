"""Numbers of microbatches that a pipeline rank holds at the points of its schedule."""

from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

from megatron_moe.pipeline.actions import Entry, actions_of

_FEW_GROUPS = 4
"""Number of microbatch groups after which the counts in `MicrobatchCounts` repeat periodically."""


class MicrobatchCounts(NamedTuple):
    """Numbers of microbatches at one point of the schedule, each with one number per model chunk."""

    in_flight: tuple[int, ...]
    """Forward has started, and backward has not ended."""
    deferred: tuple[int, ...]
    """Input gradients are computed, and weight gradients are deferred; included in `in_flight`."""
    late: tuple[int, ...]
    """Backward has ended, except for delayed expert weight gradients."""


def num_simulated_groups(interval: int) -> int:
    """Returns the number of microbatch groups that `RankMemory.microbatch_counts` simulates. `interval`:
    `--moe-expert-wgrad-interval`."""
    return _FEW_GROUPS + interval - 1


def counts_of(
    entries: Iterable[Entry], num_chunks: int, num_microbatches: int, interval: int
) -> list[MicrobatchCounts]:
    """Distinct microbatch counts after each entry of a schedule, in order of occurrence. Expert weight gradients are
    computed once per `interval` microbatches and at the end of the step."""
    now, deferred, done = [0] * num_chunks, [0] * num_chunks, [0] * num_chunks
    found: dict[MicrobatchCounts, None] = {}
    for entry in entries:
        for action in actions_of(entry):
            if action.kind == "forward":
                now[action.chunk] += 1
            elif action.kind == "backward_input":
                deferred[action.chunk] += 1
            elif action.kind in ("backward", "backward_weight"):
                deferred[action.chunk] -= action.kind == "backward_weight"
                now[action.chunk] -= 1
                done[action.chunk] += 1
        late = tuple(0 if count == num_microbatches else count % interval for count in done)
        found[MicrobatchCounts(tuple(now), tuple(deferred), late)] = None
    return list(found)


def peak_counts(
    counts: Iterable[MicrobatchCounts], chunks: Sequence[float], growth: Sequence[float], late: Sequence[float]
) -> MicrobatchCounts:
    """Counts with the most saved bytes. A microbatch in flight saves chunks[i] in chunk i, growth[i] more while it
    waits, and late[i] if only weight gradients of experts are missing."""

    def saved_bytes(at: MicrobatchCounts) -> float:
        return sum(sum(map(mul, *each)) for each in zip(at, (chunks, growth, late), strict=True))

    return max(counts, key=saved_bytes)
