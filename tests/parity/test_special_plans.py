"""Layouts and routing methods outside the parity matrix have the results of one rank."""

from dataclasses import replace

import pytest

from megatron_moe.config.linear_attention import LinearAttentionConfig
from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.moe import Balancing, MoEConfig
from tests.helpers import tiny_models
from tests.helpers.thinned import nightly_only
from tests.helpers.tiny_models import with_streams_and_hash
from tests.parity.cells import compare_plan, plan_of
from tests.parity.dimensions import cell_of

KIMI_DELTA = tiny_models.LINEAR_ATTENTION["kda"]
FOLDS = {
    "eight context-parallel ranks": ("cp=4 ep=8 dp=2 dispatcher=alltoall", {"world_size": 8, "cp": 8, "ep": 8}),
    "tensor, context and data parallelism of two stages": (
        "tp=2 sp=on cp=2 dp=2 ep=8 dispatcher=alltoall zero=on balance=bias shared=on accumulation=2",
        {"world_size": 16, "pp": 2},
    ),
}
"""Cell of the matrix and changed parallel sizes, by the ranks over which experts are divided.

The second layout is a reduced form of TP 4, CP 2, DP 8, PP 4, EP 64 on 256 ranks, with EP = TP * CP * DP.
"""


@pytest.mark.parametrize("fold", nightly_only(FOLDS, ["tensor, context and data parallelism of two stages"]))
def test_more_expert_parallel_than_data_parallel_ranks_equal_one_rank(fold: str) -> None:
    cell, sizes = FOLDS[fold]
    plan = plan_of(cell_of(cell))
    plan = replace(plan, parallel=replace(plan.parallel, **sizes))
    assert plan.parallel.ep > plan.parallel.dp and plan.parallel.edp == 1
    comparison = compare_plan(plan)
    assert comparison.all_equal, comparison.text()


@pytest.mark.parametrize("kind", ["sinkhorn", "expert_choice", "quantile_balancing"])
def test_routing_that_depends_on_all_tokens_of_a_rank_equals_one_rank_with_the_same_tokens(kind: Balancing) -> None:
    plan = plan_of(cell_of("tp=2 sp=on cp=2 ep=4 dispatcher=alltoall balance=none accumulation=2"))

    def with_method(moe: MoEConfig) -> MoEConfig:
        return replace(moe, router=replace(moe.router, balancing=(kind,), z_loss_coeff=0.01))

    comparison = compare_plan(replace(plan, model=with_experts(plan.model, with_method)))
    assert comparison.all_equal, comparison.text()


HYPER = {
    "tp=2 sp=on cp=2 pp=2 vpp=2 ep=4 dispatcher=alltoall balance=seq mtp=on accumulation=2": ("mhc", "layernorm"),
    "pp=4 stages=custom ep=2 dp=2 dispatcher=alltoall mtp=on accumulation=4 zero=on": (),
    "tp=2 layers=dense dropout=on": (),
    "dp=2 zero=params mtp=on recompute=full documents=packed": (),
    "ep=2 dp=2 overlap=experts pp=2 vpp=2 accumulation=2 dispatcher=alltoall": (),
}
"""Recomputed modules by cell of the matrix; an empty tuple stands for those of the cell.

With custom stages, the stage with the final norm sends two tensors to the stage of multi-token prediction.
"""
LONG_HYPER = [cell for cell in HYPER if cell.startswith(("pp=4", "ep=2"))]
"""Cells that run nightly; the first cell has a pipeline and prediction as well."""


@pytest.mark.parametrize("cell", nightly_only(HYPER, LONG_HYPER))
def test_several_residual_streams_and_hash_layers_equal_one_rank(cell: str) -> None:
    plan = plan_of(cell_of(cell))
    plan = replace(plan, model=with_streams_and_hash(plan.model))
    if HYPER[cell]:
        recompute = RecomputeConfig(recompute_modules=HYPER[cell])
        plan = replace(plan, memory=replace(plan.memory, recompute=recompute))
    comparison = compare_plan(plan)
    assert comparison.all_equal, comparison.text()


KIMI = (
    "tp=2 sp=on cp=2 ep=4 dispatcher=alltoall documents=packed loss=token recompute=full",
    "pp=2 vpp=2 dp=2 ep=2 dispatcher=alltoall zero=on recompute=small accumulation=2",
)
KIMI_PAIRS = (
    "tp=2 sp=on accumulation=2", "cp=2", "pp=2 vpp=2 accumulation=2", "tp=2 sp=on pp=2 accumulation=2",
    "cp=2 pp=2 vpp=2 accumulation=2 documents=packed", "tp=2 sp=on ep=2 dispatcher=alltoall optimizer=muon",
    "cp=2 ep=2 dispatcher=alltoall recompute=moe", "tp=4 sp=on", "cp=4 dp=2 zero=params",
    "cp=2 documents=varlen loss=token",
)  # fmt: skip


@pytest.mark.parametrize("cell", [*KIMI, *(pytest.param(cell, marks=pytest.mark.slow) for cell in KIMI_PAIRS)])
def test_kimi_delta_and_latent_attention_without_positions_equal_one_rank(cell: str) -> None:
    plan = plan_of(cell_of(f"{cell} attention=delta"))
    latent = replace(tiny_models.mla_config(num_heads=4), rope=None)
    layers = tuple(
        replace(layer, mixer=KIMI_DELTA if isinstance(layer.mixer, LinearAttentionConfig) else latent)
        for layer in plan.model.layers
    )
    comparison = compare_plan(replace(plan, model=replace(plan.model, layers=layers)))
    assert comparison.all_equal, comparison.text()


@pytest.mark.parametrize("mixer", ["delta", "mamba"])
def test_states_passed_between_chunks_equal_one_rank(mixer: str) -> None:
    """Linear attention with `--linear-cp-mode chunkwise`, combined with tensor and expert parallelism."""
    plan = plan_of(
        cell_of(
            f"tp=2 sp=on cp=2 ep=4 dispatcher=alltoall attention={mixer} accumulation=2 documents=packed "
            "loss=token recompute=full"
        )
    )
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, cp_mode="chunkwise"))
        if isinstance(layer.mixer, LinearAttentionConfig)
        else layer
        for layer in plan.model.layers
    )
    assert layers != plan.model.layers
    comparison = compare_plan(replace(plan, model=replace(plan.model, layers=layers)))
    assert comparison.all_equal, comparison.text()
