"""Comparison of replicated weights."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_model
from megatron_moe.config.exit_codes import DriftProblem, ExitCode
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.replica_check import check_replicas
from tests.helpers import tiny
from tests.helpers.ranks import on_threads

NORM = "decoder.layers.2.input_layernorm.weight"


def flip_lowest_bit(weights: torch.Tensor) -> None:
    weights.data.view(torch.int64).view(-1)[-1] ^= 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_flipped_bit_names_rank_and_parameter(ranks: int) -> None:
    """With two replicas the message names both ranks, with three replicas the deviating rank. Every rank exits with
    code 12."""

    def main(context: ParallelContext) -> str:
        model = build_model(tiny.plan(), context, reference.bundle())
        check_replicas(model, context, 4)
        if context.rank == 1:
            flip_lowest_bit(model.get_parameter(NORM))
        with pytest.raises(DriftProblem) as problem:
            check_replicas(model, context, 5)
        assert problem.value.code == ExitCode.DRIFT
        return str(problem.value)

    reported = on_threads(ParallelConfig(world_size=ranks), main)
    who = "rank 1 of 3 differs from the others" if ranks == 3 else "ranks 0, 1 have no majority value"
    assert (
        len(set(reported)) == 1 and reported[0].startswith("iteration 5: ") and reported[0].endswith(f"  {NORM}: {who}")
    )


def test_expert_shards_are_not_replicas() -> None:
    plan = tiny.plan(model=tiny.model(moe_config=replace(tiny.moe(), dispatcher="alltoall")))

    def main(context: ParallelContext) -> str:
        model = build_model(plan, context, reference.bundle())
        check_replicas(model, context, 1)
        experts = "decoder.layers.1.mlp.experts.linear_fc1.weight"
        if context.rank == 3:
            flip_lowest_bit(model.get_parameter(experts))
        with pytest.raises(DriftProblem) as problem:
            check_replicas(model, context, 2)
        return str(problem.value)

    reported = on_threads(ParallelConfig(world_size=4, ep=2), main)
    assert all("experts.linear_fc1.weight: ranks 1, 3 have no majority value" in each for each in reported)
