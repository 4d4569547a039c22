"""Triton kernels of weights stored in FP8, in the interpreter. Results on a GPU:
tests/gpu/test_stored_weights_on_one_gpu.py."""

from itertools import pairwise

import pytest
import torch

from megatron_moe.kernels.backends.triton import stored_weight
from megatron_moe.kernels.ops import WeightPart
from megatron_moe.kernels.reference import backend as reference
from tests.kernels.compiled import NO_SPILLS, SHARED_MEMORY, compiled
from tests.kernels.test_fp8_kernels import exact_values

BLOCK = (128, 128)
LAUNCHES = """
from megatron_moe.kernels.backends.triton import stored_weight
from megatron_moe.kernels.ops import WeightPart

for name in ("_weight_amax", "_quantize_part", "_transpose_bytes"):
    setattr(stored_weight, name, Compiled(getattr(stored_weight, name)))
part = WeightPart(torch.zeros(50000), 1000, (2, 256, 384), torch.bfloat16)
blocks, codes = torch.ones(2, 2, 3), torch.zeros(50000, dtype=torch.float8_e4m3fn)
stored_weight.weight_amax_(blocks, part, (128, 128))
stored_weight.quantize_weight_part(part, blocks, (128, 128), codes)
stored_weight.transpose_weight(torch.zeros(2, 256, 384, dtype=torch.float8_e4m3fn))
"""


@pytest.mark.slow
def test_kernels_compile_and_fit_into_a_multiprocessor() -> None:
    kernels = compiled(LAUNCHES)
    assert len(kernels) == 3
    for code in kernels:
        assert code["shared"] <= SHARED_MEMORY
        assert NO_SPILLS in code["ptxas"]


@pytest.mark.parametrize("shape", [(16, 16), (150, 40), (2, 130, 150)], ids=str)
@pytest.mark.parametrize("cuts", [(), (0.5,), (0.1, 0.101, 0.77)], ids=str)
def test_ranges_have_the_magnitudes_and_bytes_of_the_reference(shape: tuple[int, ...], cuts: tuple[float, ...]) -> None:
    """Values are E4M3 numbers plus less than half a unit of bf16: the interpreter does not round to nearest."""
    values = (exact_values(*shape, seed=3).float().clamp(-192, 192) * (1 + 2**-12)).flatten()
    places = [0, *(int(cut * len(values)) for cut in cuts), len(values)]
    num = (shape[0] if len(shape) == 3 else 1, -(-shape[-2] // 128), -(-shape[-1] // 128))
    amax, expected = torch.zeros(num), torch.zeros(num)
    factors = torch.arange(amax.numel()).remainder(2).add(1.0).view(num)
    factors = factors.mT.contiguous().mT
    codes, expected_codes = (torch.zeros(len(values), dtype=torch.float8_e4m3fn) for _ in range(2))
    for start, end in pairwise(places):
        part = WeightPart(values[start:end], start, shape, torch.bfloat16)
        stored_weight.weight_amax_(amax, part, BLOCK)
        reference.weight_amax_(expected, part, BLOCK)
        assert torch.equal(amax, expected), f"elements {start} to {end}"
        stored_weight.quantize_weight_part(part, factors, BLOCK, codes[start:end])
        reference.quantize_weight_part(part, factors, BLOCK, expected_codes[start:end])
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    data = codes.view(shape)
    found = stored_weight.transpose_weight(data)
    assert torch.equal(found.view(torch.uint8), reference.transpose_weight(data).view(torch.uint8))
