"""Symmetric memory of `--tp-comm-overlap`: the cost model agrees with memory emulation."""

from dataclasses import replace

import pytest

from megatron_moe.config.tp_overlap import OVERLAPPED
from megatron_moe.cost_model.workspace import largest_shard_bytes
from tests.memory_emulation.test_agreement import WITHIN, compare, shallow


@pytest.mark.parametrize(("tp", "gemms", "width"), [(2, OVERLAPPED, 2048), (4, ("fc1_dgrad",), 2048), (2, (), 0)])
def test_symmetric_memory_of_overlapped_communication_agrees(tp: int, gemms: tuple[str, ...], width: int) -> None:
    plan = shallow("m8")
    parallel = replace(plan.parallel, tp=tp, world_size=tp, sequence_parallel=True, tp_comm_overlap=gemms)
    found = compare(replace(plan, parallel=parallel))
    shard = 4096 // tp * plan.batch.micro_batch_size * width * 2
    assert found.closed.sequence_slots == (tp * (shard + 4 * 128) if gemms else 0)
    assert abs(found.ratio - 1) < WITHIN


def test_buffers_hold_the_larger_microbatch_of_training_and_evaluation() -> None:
    plan = shallow("m8")
    parallel = replace(plan.parallel, tp=2, world_size=2, sequence_parallel=True, tp_comm_overlap=OVERLAPPED)
    batch = replace(plan.batch, eval_micro_batch_size=2 * plan.batch.micro_batch_size)
    small, large = replace(plan, parallel=parallel), replace(plan, parallel=parallel, batch=batch)
    assert (
        largest_shard_bytes(large)
        == 2 * largest_shard_bytes(small)
        == 2 * 2048 * plan.batch.micro_batch_size * 2048 * 2
    )
