"""Ways to choose that look at all tokens of a rank: one rank that is given the layout's partition chooses the same."""

from dataclasses import replace

import pytest

from megatron_moe.config.model import with_experts
from megatron_moe.config.moe import Balancing, MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.oracle import record_oracle
from megatron_moe.layout_check.record import RankRecord, record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.parity.cells import kernels, plan_of
from tests.parity.dimensions import cell_of

NUM_STEPS = 2
CELL = "tp=2 sp=on cp=2 dp=2 ep=4 dispatcher=alltoall balance=none accumulation=2"


def plan_with(kind: Balancing) -> RunPlan:
    plan = plan_of(cell_of(CELL))

    def changed(moe: MoEConfig) -> MoEConfig:
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
