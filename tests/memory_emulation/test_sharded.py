"""Memory of the cost model agrees with that of memory emulation for sharded gradients, weights and optimizer state."""

from dataclasses import replace
from typing import Literal

import pytest

from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import is_elementwise
from tests.memory_emulation.test_agreement import Compared, compare, shallow

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

COPIES = FSDPConfig(gathers_from_peers=True, reduces_through_peers=True)
ZERO_3, ZERO_2 = FSDPConfig(), FSDPConfig(shards_weights=False)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (FSDPConfig(), {"world_size": 2}),
        (FSDPConfig(fsdp_double_buffer=True), {"world_size": 8, "num_distributed_optimizer_instances": 2}),
        (FSDPConfig(outer_dp_sharding_strategy="optim"), {"world_size": 8, "num_distributed_optimizer_instances": 2}),
        (FSDPConfig(fsdp_double_buffer=True), {"world_size": 4, "ep": 2, "pp": 2}),
        (FSDPConfig(shards_weights=False, grad_comm="bf16"), {"world_size": 2}),
        (FSDPConfig(num_passes=2), {"world_size": 4, "ep": 2}),
        (FSDPConfig(num_passes=2), {"world_size": 8, "ep": 2, "pp": 4, "virtual_stages": 2}),
        (replace(COPIES, grad_comm="bf16"), {"world_size": 4, "ep": 2, "ranks_per_host": 4}),
        (COPIES, {"world_size": 8, "ep": 2, "num_distributed_optimizer_instances": 2, "ranks_per_host": 4}),
        (COPIES, {"world_size": 8, "ranks_per_host": 4}),
    ],
    ids=[
        "weights",
        "double buffer and replicas",
        "outer",
        "stages",
        "gradients",
        "two passes",
        "passes and stages",
        "copies",
        "copies and replicas",
        "two hosts",
    ],
)
def test_sharded_gradients_and_weights_agree(config: FSDPConfig, axes: dict[str, int]) -> None:
    check_sharded(with_sharding(shallow("m8", 8 if "pp" in axes else 3), config, axes))


def test_stored_weights_of_replicas_agree() -> None:
    config = FSDPConfig(outer_dp_sharding_strategy="optim")
    plan = with_sharding(shallow("m8"), config, {"world_size": 8, "num_distributed_optimizer_instances": 2})
    low = low_precision_config("blockwise")
    found = compare(replace(plan, precision=replace(plan.precision, low_precision=low, low_precision_params=True)), 0)
    assert abs(found.ratio - 1) < 0.005
    assert found.emulated["weights"] == pytest.approx(found.closed.state.weights, rel=0.01)


STRATEGIES = {"zero-1": None, "zero-2": ZERO_2, "zero-3": ZERO_3}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rule", ["muon", "adaptive_muon", "lion"])
def test_state_of_other_update_rules_agrees(rule: str, name: str) -> None:
    """With Muon, the rank that owns the most state has the highest peak; it is not always rank 0."""
    plan = with_sharding(shallow("m8"), STRATEGIES[name], {"world_size": 2})
    check_state(replace(plan, optimizer=replace(plan.optimizer, optimizer=rule)))


def test_owners_of_tensor_parallel_matrices_agree() -> None:
    plan = with_sharding(shallow("m8"), None, {"world_size": 4, "tp": 2, "sequence_parallel": True})
    check_state(replace(plan, optimizer=replace(plan.optimizer, optimizer="muon")))


def check_state(plan: RunPlan) -> None:
    found = check_sharded(plan)
    state = found.closed.state
    for name, expected in (("master weights", state.master), ("moments", state.moments)):
        assert expected > 0 and found.emulated[name] == pytest.approx(expected, rel=0.005), name


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise"])
def test_temporary_memory_of_muon_agrees(mode: Literal["duplicated", "distributed", "blockwise"]) -> None:
    """The sequences are so short that the peak is in the update."""
    plan = with_sharding(shallow("m8"), None, {"world_size": 2, "tp": 2, "etp": 2, "sequence_parallel": True})
    optimizer = replace(plan.optimizer, optimizer="muon", muon=replace(plan.optimizer.muon, muon_tp_mode=mode))
    batch = replace(plan.batch, micro_batch_size=1, global_batch_size=4)
    found = compare(replace(plan, optimizer=optimizer, batch=batch, data=replace(plan.data, seq_length=128)))
    assert abs(found.ratio - 1) < 0.005
    assert found.closed.staging == pytest.approx(found.emulated["workspace"], rel=0.001)


def with_sharding(plan: RunPlan, config: FSDPConfig | None, axes: dict[str, int]) -> RunPlan:
    """`config`: None for ZeRO-1."""
    parallel = replace(plan.parallel, **axes)
    return replace(
        plan,
        model=with_experts(plan.model, lambda moe: replace(moe, dispatcher="alltoall")),
        parallel=parallel,
        data_parallel=DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, fsdp=config),
        memory=replace(plan.memory, moe_expert_wgrad_interval=1),
        pipeline=replace(plan.pipeline, overlap=config is not None and config.num_passes == 2, layout=None),
        batch=replace(plan.batch, global_batch_size=4 * parallel.dp * plan.batch.micro_batch_size),
    )


def check_sharded(plan: RunPlan) -> Compared:
    found = max((compare(plan, dp_rank) for dp_rank in range(num_owners(plan))), key=lambda each: each.peak)
    assert abs(found.ratio - 1) < 0.005
    for name in ("weights", "gradients"):
        assert found.emulated[name] == pytest.approx(getattr(found.closed.state, name), rel=0.005), name
    return found


def num_owners(plan: RunPlan) -> int:
    """Number of ranks of a stage to emulate: 1 if all have equal shares of the state."""
    return 1 if is_elementwise(plan.optimizer) else plan.parallel.world_size // plan.parallel.pp
