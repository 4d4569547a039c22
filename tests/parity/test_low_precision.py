"""FP8 training by emulation: every layout whose shards do not cut blocks gives the results of one rank.

Products are computed in double precision, so results differ only where an element is quantised differently. Blocks
along the channels have 4 elements, which divides every shard. Columnwise blocks extend over the tokens, and expert rows
of several microbatches share an expert's GEMM under expert parallelism: one rank with the same blocks exists only for
weight gradients in the dtype of the parameters, or for blocks of one element.
"""

from dataclasses import replace

import pytest

from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from tests.parity.cells import compare_plan, plan_of
from tests.parity.dimensions import cell_of

PLAIN_WEIGHT_GRAD = low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False)
SINGLE_ELEMENTS = low_precision_config("blockwise", blocks=1)
LAYOUTS = (
    "plain",
    "tp=2 sp=on shared=on",
    "tp=4 sp=on mtp=on",
    "tp=2 layers=dense wgrad=delayed",
    "cp=2 attention=mla latent=on",
    "pp=2 vpp=2 accumulation=2 mtp=on head=tied",
    "dp=2 zero=on overlap=params accumulation=2",
    "dp=4 ep=4 dispatcher=alltoall shared=overlap",
    "dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather accumulation=2",
    "dp=4 ep=4 dispatcher=flex recompute=small",
    "dp=2 ep=2 dispatcher=alltoall overlap=experts accumulation=4",
    "experts=sequential recompute=full capacity=pad",
    "recompute=moe documents=packed",
)
"""Cells of the parity matrix."""
PER_TENSOR_LAYOUTS = ("dp=2 zero=on accumulation=2", "pp=2 accumulation=2 recompute=small")
"""Cells whose GEMM operands are the same tensors on one rank."""


def check(name: str, config: LowPrecisionConfig) -> None:
    plan = plan_of(cell_of(name))
    comparison = compare_plan(replace(plan, precision=replace(plan.precision, low_precision=config)))
    assert comparison.equal, comparison.text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_plain_weight_gradients_equal_one_rank(name: str) -> None:
    check(name, PLAIN_WEIGHT_GRAD)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_quantised_weight_gradients_equal_one_rank(name: str) -> None:
    check(name, SINGLE_ELEMENTS)


@pytest.mark.parametrize("name", PER_TENSOR_LAYOUTS)
@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_layouts_with_the_same_tensors_equal_one_rank(name: str, recipe: str) -> None:
    check(name, low_precision_config(recipe, hybrid=True))
