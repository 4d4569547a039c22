"""Ways to choose that look at all tokens of a rank: one rank that is given the layout's partition chooses the same."""

from dataclasses import replace

import pytest

from megatron_moe.compare.oracle import record_oracle, with_experts
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

    return replace(plan, model=with_experts(plan.model, changed))


@pytest.mark.parametrize("kind", ["sinkhorn", "expert_choice", "quantile_balancing"])
def test_a_choice_among_many_tokens_equals_that_of_one_rank_with_the_same_tokens(kind: Balancing) -> None:
    plan = plan_with(kind)
    datasets = random_datasets(plan, num_steps=NUM_STEPS)

    def record(context: ParallelContext) -> RankRecord:
        return record_run(plan, context, kernels(), datasets, num_steps=NUM_STEPS)

    oracle = record_oracle(plan, ParallelContext.single(), kernels(), datasets, num_steps=NUM_STEPS)
    comparison = compare_runs(oracle, on_threads(plan.parallel, record), rtol=FP64_LAYOUT.rtol)
    assert comparison.equal, comparison.text()
