"""Memory slots of a pipeline schedule: which microbatches use the same memory one after the other."""

from collections.abc import Iterable

from megatron_moe.pipeline.actions import Entry, actions_of

At = tuple[int, int]
"""(microbatch, index of the model chunk on its rank)."""


def memory_slots(entries: Iterable[Entry]) -> dict[At, int]:
    """Returns the number of the memory slot that each microbatch occupies from its forward to the end of its backward,
    for the schedule of one rank. The number of slots is the maximum number of microbatches in flight at the same time
    over all chunks. A microbatch gets a slot that its chunk has used before, if one is free."""
    slots: dict[At, int] = {}
    users: list[set[int]] = []
    """Chunks that have used each slot."""
    free: set[int] = set()
    for entry in entries:
        for action in actions_of(entry):
            at = action.microbatch, action.chunk
            if action.kind == "forward":
                if not free:
                    free.add(len(users))
                    users.append(set())
                slots[at] = min(free, key=lambda slot: (action.chunk not in users[slot], len(users[slot]), slot))
                free.remove(slots[at])
                users[slots[at]].add(action.chunk)
            elif action.kind in ("backward", "backward_weight"):
                free.add(slots[at])
    return slots
