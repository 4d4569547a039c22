"""Folds in which expert parallelism is wider than data parallelism, beyond the ranks that the matrix has."""

from dataclasses import replace

import pytest

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
FOLDS = {
    "experts over eight parts of a sequence": (
        "cp=4 ep=8 dp=2 dispatcher=alltoall",
        {"world_size": 8, "cp": 8, "ep": 8},
    ),
    "experts over tensor, context and data parallelism of each of two stages": (
        "tp=2 sp=on cp=2 dp=2 ep=8 dispatcher=alltoall zero=on balance=bias shared=on accumulation=2",
        {"world_size": 16, "pp": 2},
    ),
}
"""Name -> a cell of the matrix, and the sizes that take it further. The second one is TP 4, CP 2, DP 8, PP 4 and EP 64
on 256 ranks, where EP = TP * CP * DP, with smaller numbers."""


def wide_plan(fold: str) -> RunPlan:
    cell, sizes = FOLDS[fold]
    plan = plan_of(cell_of(cell))
    return replace(plan, parallel=replace(plan.parallel, **sizes))


def record(plan: RunPlan, context: ParallelContext) -> RankRecord:
    return record_run(plan, context, kernels(), random_datasets(plan, num_steps=NUM_STEPS), num_steps=NUM_STEPS)


def oracle_of(plan: RunPlan) -> RankRecord:
    datasets = random_datasets(plan, num_steps=NUM_STEPS)
    return record_oracle(plan, ParallelContext.single(), kernels(), datasets, num_steps=NUM_STEPS)


@pytest.mark.parametrize("fold", FOLDS)
def test_experts_over_more_ranks_than_copies_of_attention_equal_one_rank(fold: str) -> None:
    plan = wide_plan(fold)
    assert plan.parallel.ep > plan.parallel.dp and plan.parallel.edp == 1
    ranks = on_threads(plan.parallel, lambda context: record(plan, context))
    comparison = compare_runs(oracle_of(plan), ranks, rtol=FP64_LAYOUT.rtol)
    assert comparison.equal, comparison.text()
