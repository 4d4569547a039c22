"""Weights quantised in parts: any division into ranges gives the bytes and scales of the whole weight."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat, low_precision_config
from megatron_moe.kernels.ops import WeightPart
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.nvfp4 import weight_scales
from megatron_moe.precision.optimizer_state import round_weights
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from megatron_moe.precision.quantizers import SCALE_DTYPES, block_scales, element_dtype, quantize_weight
from megatron_moe.precision.stored_weight import StoredWeight

FORMS = {
    "tensorwise": low_precision_config("tensorwise").weights,
    "blockwise": low_precision_config("blockwise", blocks=4).weights,
    "fp32 scales": low_precision_config("blockwise", blocks=4, power_of_2=False).weights,
    "mxfp8": low_precision_config("mxfp8").weights,
    "single elements": low_precision_config("blockwise", blocks=1).weights,
    "nvfp4": low_precision_config("nvfp4", blocks=2).weights,
}
SHAPES = ((8, 12), (9, 7), (3, 10, 6), (2, 5, 33), (2, 9, 4), (1, 5))
CASES = [(name, shape) for name, fmt in FORMS.items() for shape in SHAPES if fmt.can_store_weights(shape[-1])]


def masters(shape: tuple[int, ...]) -> Tensor:
    """fp32 values over many magnitudes, with ties between bf16 numbers."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(9).exp2()
    values.view(-1)[:5] = torch.tensor([0.0, 1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 0.0])
    return values


def stored(values: Tensor, fmt: OperandFormat, cuts: list[int], dtype: torch.dtype = torch.bfloat16) -> StoredWeight:
    """Quantises the ranges between the cuts one after the other, like the ranks that own them."""
    weight, flat = StoredWeight(tuple(values.shape), fmt, dtype), values.flatten()
    codes = tuple(torch.full((len(flat) * bits // 8,), 77, dtype=torch.uint8) for bits in weight.code_bits)
    parts = [WeightPart(flat[a:b], a, weight.shape, dtype) for a, b in pairwise([0, *cuts, len(flat)]) if a < b]
    scales, matrix_factors = [], None
    for grid, code in zip(weight.grids, codes, strict=True):
        found = []
        for part in parts:
            of_rank = torch.zeros(grid.size)
            reference.weight_amax_(grid.view(of_rank), part, grid.block)
            found.append(of_rank)
        amax = torch.stack(found).amax(dim=0)
        if fmt.element == "e2m1":
            factors, made, matrix_factors = weight_scales(grid.view(amax))
        else:
            factors, made = block_scales(amax, fmt, dtype)
        assert made.dtype == SCALE_DTYPES[fmt.scale]
        scales.append(made)
        for part in parts:
            size = len(part.values) * fmt.bits // 8
            out = code[part.start * fmt.bits // 8 :][:size].view(element_dtype(fmt.element))
            reference.quantize_weight_part(part, grid.view(factors), grid.block, out)
    weight.attach(codes, tuple(scales), matrix_factors)
    return weight


def check(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    for copy, other in ((found.row_copy, expected.row_copy), (found.column_copy, expected.column_copy)):
        assert copy.data.shape == other.data.shape and copy.scales.shape == other.scales.shape
        assert torch.equal(copy.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(copy.scales.float(), other.scales.float())
        assert (copy.factor is None) == (other.factor is None)
        assert copy.factor is None or torch.equal(copy.factor, other.factor)
    assert (found.block, found.dtype) == (expected.block, expected.dtype)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_every_division_gives_the_bytes_of_the_whole_weight(name: str, shape: tuple[int, ...]) -> None:
    """Packed elements are divided between bytes."""
    values, fmt = masters(shape), FORMS[name]
    expected = quantize_weight(round_weights(values, torch.bfloat16), fmt, columnwise=True)
    size = values.numel()
    step = 8 // fmt.bits
    few = [size // 3 // step * step] * 2 + [size // 2 // step * step]
    divisions = [[], *([cut] for cut in range(step, size, step)), few, list(range(step, size, step))]
    for cuts in divisions if size < 100 else divisions[::7]:
        weight = stored(values, fmt, cuts)
        assert weight.operand().columnwise is None
        check(weight.with_columns(reference.transpose_weight), expected)


def test_values_are_rounded_to_the_dtype_of_the_run_first() -> None:
    values = torch.tensor([[1 + 2**-4 + 2**-9, 448.0]])  # the tie of e4m3 that bf16 rounds down to goes to the even 1
    fmt = FORMS["tensorwise"]
    assert stored(values, fmt, []).operand().row_copy.data.float().tolist() == [[1.0, 448.0]]
    assert stored(values, fmt, [], torch.float32).operand().row_copy.data.float().tolist() == [[1.125, 448.0]]
