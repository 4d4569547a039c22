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


@pytest.mark.parametrize(("recipe", "cp", "channels"), [("m8", 2, 16 * (192 + 128)), ("q6", 4, 2 * 4 * 128)])
def test_symmetric_memory_of_context_parallel_rings_agrees(recipe: str, cp: int, channels: int) -> None:
    """Ranks on several hosts exchange keys and values by NCCL."""
    plan = shallow(recipe)
    parallel = replace(plan.parallel, cp=cp, ep=1, world_size=2 * cp, shares_memory=True)
    for ranks_per_host, sharing in ((2 * cp, True), (cp // 2, False)):
        found = compare(replace(plan, parallel=replace(parallel, ranks_per_host=ranks_per_host)))
        elements = 4096 // cp * plan.batch.micro_batch_size * channels
        slots = elements * 2 + elements * (2 if cp == 2 else 4) + cp * 4 * 128
        assert found.closed.context_slots == (slots if sharing else 0)
        assert abs(found.ratio - 1) < WITHIN


@pytest.mark.parametrize(("recipe", "cp", "channels"), [("m8", 2, 16 * 192), ("q6", 4, 4 * 128)])
def test_symmetric_memory_of_gathered_keys_agrees(recipe: str, cp: int, channels: int) -> None:
    """Keys and values are gathered one after the other; keys of latent attention are wider."""
    plan = shallow(recipe)
    mixers = [
        replace(each.mixer, core=replace(each.mixer.core, context_exchange="allgather")) for each in plan.model.layers
    ]
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(plan.model.layers, mixers, strict=True))
    parallel = replace(plan.parallel, cp=cp, ep=1, world_size=2 * cp, ranks_per_host=2 * cp, shares_memory=True)
    found = compare(replace(plan, model=replace(plan.model, layers=layers), parallel=parallel))
    shard = 4096 // cp * plan.batch.micro_batch_size * channels * 2
    assert found.closed.context_slots == cp * (shard + 4 * 128)
    assert abs(found.ratio - 1) < WITHIN
