"""Emulated FP8 layouts of two ranks under NCCL give the loss, norm, gradients and weights of one CPU rank.

As in tests/parity/test_low_precision.py, GEMMs are computed in double precision.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.record import RankRecord
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP64_LAYOUT
from tests.parity.cells import plan_of, record, record_one_rank
from tests.parity.dimensions import cell_of
from tests.parity.test_low_precision import DELAYED, LAYOUTS, PLAIN_WEIGHT_GRAD, SINGLE_ELEMENTS

pytestmark = pytest.mark.gpu2

CONFIGS = {
    "blockwise": PLAIN_WEIGHT_GRAD,
    "blockwise, weight gradients too": SINGLE_ELEMENTS,
    "delayed": DELAYED,
    "mxfp8": low_precision_config("mxfp8", blocks=4, weight_grad=False),
}


def low_precision_plan(name: str, config: LowPrecisionConfig) -> RunPlan:
    plan = plan_of(cell_of(f"{name} loss=token"))
    return replace(plan, precision=replace(plan.precision, low_precision=config))


def run_rank(context: ParallelContext, name: str, config: LowPrecisionConfig) -> RankRecord:
    return record(low_precision_plan(name, config), context)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if plan_of(cell_of(name)).parallel.world_size == 2])
def test_layouts_equal_one_rank(name: str, config: LowPrecisionConfig) -> None:
    plan = low_precision_plan(name, config)
    with ThreadPoolExecutor(1) as executor:
        expected = executor.submit(record_one_rank, plan)
        ranks = on_gpus(plan.parallel, run_rank, name, config, dtype=torch.float64)
        comparison = compare_runs(expected.result(), ranks, rtol=FP64_LAYOUT.rtol)
    assert comparison.all_equal, comparison.text()
