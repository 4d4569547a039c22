"""Layouts whose modules or steps are replayed give the numbers of one rank that computes, in double precision."""

import pytest

from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.layout_check.table import compare_runs
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.parity.cells import oracle_of, plan_of, record
from tests.parity.dimensions import cell_of

MODULES = CudaGraphConfig(cuda_graph_modules=("attn", "mamba", "moe_router"), cuda_graph_warmup_steps=1)
STEP = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
CELLS = {
    "cp=2 cpcomm=a2a pp=2 vpp=2 dispatcher=flex wgrad=delayed balance=none loss=token accumulation=2": MODULES,
    "tp=4 sp=on dispatcher=allgather balance=none capacity=position groups=shared accumulation=2 recompute=moe": STEP,
}


@pytest.mark.parametrize("name", CELLS)
def test_replayed_layouts_equal_one_rank(name: str) -> None:
    plan = plan_of(cell_of(name))
    ranks = on_threads(plan.parallel, lambda context: record(plan, context, graphs=CELLS[name]))
    comparison = compare_runs(oracle_of(name), ranks, rtol=FP64_LAYOUT.rtol)
    assert comparison.equal, comparison.text()
