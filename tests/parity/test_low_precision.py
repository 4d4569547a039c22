"""Emulated FP8 training: every layout whose shards do not cut blocks has the results of one rank.

GEMMs are computed in fp64, so results differ only where an element is quantised differently. Blocks along the channels
have 4 elements, which divides every shard. Columnwise blocks extend over tokens, and under expert parallelism the rows
of several ranks are in the same GEMM of an expert. One rank therefore has the same blocks only if weight gradients are
computed in the dtype of the parameters, or if blocks have one element.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.model import with_experts
from megatron_moe.config.precision import WHOLE, LowPrecisionConfig, OperandFormat, low_precision_config
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.precision import nvfp4, quantizers
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import FP64_LAYOUT
from tests.parity.cells import compare_plan, plan_of, record_one_rank
from tests.parity.dimensions import cell_of

PLAIN_WEIGHT_GRAD = low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False)
SINGLE_ELEMENTS = low_precision_config("blockwise", blocks=1)
DELAYED = low_precision_config("delayed", hybrid=True, amax_history_len=2, amax_compute_algo="max", margin=1)
LAYOUTS = (
    "plain",
    "tp=2 sp=on shared=on",
    "tp=4 sp=on mtp=on",
    "tp=2 layers=dense wgrad=delayed",
    "cp=2 attention=mla latent=on",
    "pp=2 vpp=2 accumulation=2 mtp=on head=tied",
    "dp=2 zero=params overlap=params accumulation=2",
    "dp=4 ep=4 dispatcher=alltoall shared=overlap",
    "dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather accumulation=2",
    "dp=4 ep=4 dispatcher=flex recompute=small",
    "dp=2 ep=2 dispatcher=alltoall zero=params overlap=experts accumulation=4",
    "experts=sequential recompute=full capacity=pad",
    "recompute=moe documents=packed",
    "tp=2 sp=on attention=mamba",
    "cp=2 attention=delta",
    "pp=2 attention=mamba layers=single",
)
"""Cells of the parity matrix that most tests below use."""
CUT_BLOCKS = ("tp=4 sp=on attention=mla mtp=on",)
"""Cells whose shards cut blocks of 4 elements; only recipes with one scale per tensor support them."""
PER_TENSOR_LAYOUTS = ("dp=2 zero=buffers accumulation=2 loss=token", "pp=2 accumulation=2 recompute=small")
"""Cells whose GEMM operands are the same tensors as on one rank."""
SHARDED_LAYOUTS = (
    "tp=2 sp=on shared=on",
    "dp=4 ep=4 dispatcher=flex recompute=small",
    "cp=2 attention=mla latent=on",
    "pp=2 vpp=2 accumulation=2 mtp=on head=tied",
    "dp=2 ep=2 dispatcher=alltoall overlap=experts accumulation=4",
    "dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather accumulation=2",
)
WHOLE_LAYOUTS = ("experts=sequential recompute=full capacity=pad", "recompute=moe documents=packed")
SAME_TOKENS = ("tp=2 sp=on etp=2 dispatcher=allgather shared=on", "tp=2 layers=dense wgrad=delayed")
"""Cells that do not distribute tokens over ranks, so columnwise blocks are the same as on one rank."""


def check(name: str, config: LowPrecisionConfig) -> None:
    plan = plan_of(cell_of(name))
    comparison = compare_plan(replace(plan, precision=replace(plan.precision, low_precision=config)))
    assert comparison.all_equal, comparison.text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_plain_weight_gradients_equal_one_rank(name: str) -> None:
    check(name, PLAIN_WEIGHT_GRAD)


@pytest.mark.parametrize("name", thinned(SHARDED_LAYOUTS, 3))
def test_layouts_with_activation_inputs_in_fp8_equal_one_rank(name: str) -> None:
    check(name, replace(PLAIN_WEIGHT_GRAD, activation_inputs=True))


@pytest.mark.parametrize("name", thinned(LAYOUTS))
def test_layouts_with_quantised_weight_gradients_equal_one_rank(name: str) -> None:
    check(name, SINGLE_ELEMENTS)


@pytest.mark.parametrize("name", thinned((*LAYOUTS[::-1], *CUT_BLOCKS)))
def test_layouts_with_delayed_scales_equal_one_rank(name: str) -> None:
    """The scales of the first step are 1, so gradients must have the same magnitude in every layout.

    With the per-token loss, the loss is not divided by the number of data-parallel ranks before backward.
    """
    check(f"{name} loss=token".removeprefix("plain "), DELAYED)


@pytest.mark.parametrize("name", PER_TENSOR_LAYOUTS)
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_layouts_with_the_same_tensors_equal_one_rank(name: str, recipe: str) -> None:
    """All quantised copies have their own scales; nvfp4 also has the Hadamard transform and stochastic rounding."""
    check(name, low_precision_config(recipe, hybrid=True))


@pytest.mark.parametrize("name", SHARDED_LAYOUTS)
def test_layouts_with_mxfp8_equal_one_rank(name: str) -> None:
    check(name, low_precision_config("mxfp8", blocks=4, weight_grad=False))


@pytest.fixture
def given_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes scales of whole tensors constant, because the maximum of a shard may differ from that of the tensor."""
    quantization_scale = quantizers.quantization_scale

    def given(amax: Tensor, fmt: OperandFormat, dtype: torch.dtype) -> Tensor:
        return torch.full_like(amax, 32.0) if fmt.block == WHOLE else quantization_scale(amax, fmt, dtype)

    monkeypatch.setattr(quantizers, "quantization_scale", given)
    monkeypatch.setattr(nvfp4, "_matrix_scale", lambda amax: torch.full_like(amax, 256.0))


@pytest.mark.parametrize("name", (*SHARDED_LAYOUTS, *WHOLE_LAYOUTS))
def test_layouts_with_nvfp4_and_given_scales_equal_one_rank(name: str, given_scales: None) -> None:
    """Stochastic rounding of gradients is the same in every layout for the same block of channels of a token."""
    check(f"{name} loss=token", low_precision_config("nvfp4", blocks=4, weight_grad=False))


@pytest.mark.parametrize("name", SAME_TOKENS)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_tensor_parallel_layouts_with_quantised_weight_gradients_equal_one_rank(
    name: str, recipe: str, given_scales: None
) -> None:
    """Tensor parallelism cuts neither columnwise blocks nor the Hadamard transform, which extend over tokens."""
    check(name, low_precision_config(recipe, blocks=4))


@pytest.mark.parametrize("name", SHARDED_LAYOUTS[:2])
def test_layouts_with_tensorwise_and_given_scales_equal_one_rank(name: str, given_scales: None) -> None:
    check(f"{name} loss=token", low_precision_config("tensorwise", hybrid=True))


@pytest.mark.parametrize(
    "name", ["dp=2 ep=2 dispatcher=alltoall loss=token", "tp=2 sp=on ep=2 dispatcher=flex accumulation=2"]
)
def test_padded_expert_rows_equal_one_rank(name: str) -> None:
    """Padding rows of --moe-router-padding-for-quantization change no result."""
    plan = plan_of(cell_of(name))
    padded = with_experts(plan.model, lambda moe: replace(moe, row_alignment=8))
    plan = replace(plan, model=padded, precision=replace(plan.precision, low_precision=DELAYED))
    comparison = compare_plan(plan)
    assert comparison.all_equal, comparison.text()
    unpadded = with_experts(plan.model, lambda moe: replace(moe, row_alignment=1))
    comparison = compare_runs(
        record_one_rank(replace(plan, model=unpadded)), [record_one_rank(plan)], rtol=FP64_LAYOUT.rtol
    )
    assert comparison.all_equal, comparison.text()


@pytest.mark.parametrize(
    "name",
    [
        "dp=4 ep=4 dispatcher=flex recompute=small shared=overlap",
        "dp=2 ep=2 dispatcher=flex overlap=experts accumulation=4",
        "tp=2 sp=on ep=2 dispatcher=flex recompute=moe zero=on",
    ],
)
def test_layouts_that_exchange_tokens_in_fp8_equal_one_rank(name: str) -> None:
    """Weight gradients are equal, too, because quantising received rows again in blocks of one element is exact."""
    plan = plan_of(cell_of(name))
    model = with_experts(plan.model, lambda moe: replace(moe, fp8_dispatch=True, fp8_combine_grad=True))
    plan = replace(plan, model=model, precision=replace(plan.precision, low_precision=SINGLE_ELEMENTS))
    comparison = compare_plan(plan)
    assert comparison.all_equal, comparison.text()
