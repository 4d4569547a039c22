"""Memory slots: one per microbatch in flight, and at most one microbatch per slot at a time."""

import pytest

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.pipeline.actions import actions_of
from megatron_moe.pipeline.schedule import computations
from megatron_moe.pipeline.slots import memory_slots

SCHEDULES = {
    "one stage": ScheduleConfig(num_microbatches=5),
    "one stage, pairs": ScheduleConfig(num_microbatches=5, overlap=True),
    "1F1B": ScheduleConfig(num_microbatches=9, pp=4),
    "1F1B, weight gradients later": ScheduleConfig(num_microbatches=9, pp=4, split_backward=True),
    "interleaved": ScheduleConfig(num_microbatches=16, pp=4, vpp=3),
    "interleaved, pairs, weight gradients later": ScheduleConfig(
        num_microbatches=16, pp=4, vpp=4, overlap=True, split_backward=True
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_slots_are_used_by_one_microbatch_at_a_time(name: str) -> None:
    config = SCHEDULES[name]
    for rank in range(config.pp):
        entries = computations(config, rank)
        slots, used, most = memory_slots(entries), set[int](), 0
        for action in (action for entry in entries for action in actions_of(entry)):
            slot = slots[action.microbatch, action.chunk]
            if action.kind == "forward":
                assert slot not in used
                used.add(slot)
                most = max(most, len(used))
            elif action.kind != "backward_input":
                used.remove(slot)
        assert len(set(slots.values())) == most
        assert len(slots) == config.num_microbatches * config.vpp


def test_microbatches_prefer_the_slots_of_their_chunk() -> None:
    """A chunk uses few slots, because its graphs are captured once per slot that it uses."""
    config = ScheduleConfig(num_microbatches=32, pp=4, vpp=4, overlap=True)
    slots = memory_slots(computations(config, 0))
    assert len(set(slots.values())) == 20
    assert len({(slot, chunk) for (_, chunk), slot in slots.items()}) == 28
