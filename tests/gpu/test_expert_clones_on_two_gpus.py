"""Clones of busy experts under NCCL give the loss, gradients and weights of one rank without clones.

The one rank also runs on a GPU, whose generator draws other random logits for the unequal load than that of a CPU.
"""

import pytest
import torch

from megatron_moe.layout_check.record import RankRecord
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP32_LAYOUT, FP64_LAYOUT
from tests.parity.cells import record, record_in_fp32, record_one_rank
from tests.parity.test_echo import AGAIN, OVERLAP, plan_with_clones

pytestmark = pytest.mark.gpu2
CELLS = {
    "ep=2 dp=2 accumulation=2 zero=on overlap=params": OVERLAP,
    "ep=2 dp=2 accumulation=2 shared=overlap recompute=small": AGAIN,
}


def run(context: ParallelContext, cell: str) -> RankRecord:
    """One rank of the cell: in fp64 on the reference kernels, in fp32 on the kernels that the GPU runs fastest."""
    plan = plan_with_clones(cell, 4, CELLS[cell])
    return record(plan, context) if context.dtype is torch.float64 else record_in_fp32(plan, context)


@pytest.mark.parametrize("tolerance", [FP64_LAYOUT, FP32_LAYOUT], ids=["fp64", "fp32"])
@pytest.mark.parametrize("cell", CELLS)
def test_clones_under_nccl_match_one_rank(cell, tolerance):
    plan = plan_with_clones(cell, 4, CELLS[cell])
    dtype = torch.float64 if tolerance is FP64_LAYOUT else torch.float32
    comparison = compare_runs(
        record_one_rank(plan, "cuda:0"), on_gpus(plan.parallel, run, cell, dtype=dtype), rtol=tolerance.rtol
    )
    assert comparison.all_equal, comparison.text()
