"""Ways to choose that look at all tokens of a rank: one rank that is given the layout's partition chooses the same."""

from dataclasses import replace

import pytest

from megatron_moe.compare.oracle import oracle_plan, partition_tokens
from megatron_moe.compare.record import RankRecord, record_run
from megatron_moe.compare.samples import random_datasets
from megatron_moe.compare.table import compare_runs
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.moe import Balancing, MoESpec
from megatron_moe.specs.run import RunPlan
from tests.parity.cells import kernels, plan_of
from tests.parity.dimensions import cell_of
from tests.ranks import on_threads
from tests.tolerances import FP64_LAYOUT

NUM_STEPS = 2
CELL = "tp=2 sp=on cp=2 dp=2 ep=4 dispatcher=alltoall balance=none accumulation=2"


def plan_with(kind: Balancing) -> RunPlan:
    plan = plan_of(cell_of(CELL))

    def changed(moe: MoESpec) -> MoESpec:
        return replace(moe, router=replace(moe.router, balancing=(kind,), z_loss_coeff=0.01))

    layers = (
        replace(layer, feed_forward=changed(layer.feed_forward)) if isinstance(layer.feed_forward, MoESpec) else layer
        for layer in plan.model.layers
    )
    return replace(plan, model=replace(plan.model, layers=tuple(layers)))


@pytest.mark.parametrize("kind", ["sinkhorn", "expert_choice", "quantile_balancing"])
def test_a_choice_among_many_tokens_equals_that_of_one_rank_with_the_same_tokens(kind: Balancing) -> None:
    plan = plan_with(kind)
    datasets = random_datasets(plan, num_steps=NUM_STEPS, uneven=True)

    def record(context: ParallelContext) -> RankRecord:
        return record_run(plan, context, kernels(), datasets, num_steps=NUM_STEPS)

    oracle = record_run(
        oracle_plan(plan),
        ParallelContext.single(),
        kernels(),
        datasets,
        num_steps=NUM_STEPS,
        prepare=lambda trainer: partition_tokens(trainer, plan),
    )
    comparison = compare_runs(oracle, on_threads(plan.parallel, record), rtol=FP64_LAYOUT.rtol)
    assert comparison.equal, comparison.text()
