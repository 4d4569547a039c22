"""Triton kernels for weights stored in FP8 with one scale per 128x128 elements: quantisation of ranges of master
weights, and transposed copies.

A program handles the elements of one block that are in the range. Ranges may begin and end inside blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.quantize import BLOCK, LENGTH, magnitude_bits
from megatron_moe.kernels.ops import WeightPart

_WARPS = 8
_ALIGNMENT = tl.constexpr(16)
_FAR = tl.constexpr(0x7FFFFFF0)
"""Largest offset in a block, a multiple of the alignment."""


def weight_amax_(amax: Tensor, part: WeightPart, block: tuple[int, int]) -> None:
    """See `Kernels.weight_amax_`, for blocks of 128x128."""
    grid, sizes, constants = _launch(part, block)
    _weight_amax[grid](part.values, amax, *sizes, *amax.stride(), **constants, num_warps=_WARPS)


def quantize_weight_part(part: WeightPart, factors: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """Writes `part` in FP8; see `Kernels.quantize_weight_part`, for blocks of 128x128."""
    grid, sizes, constants = _launch(part, block)
    _quantize_part[grid](part.values, factors, out, *sizes, *factors.stride(), **constants, num_warps=_WARPS)


def transpose_weight(data: Tensor) -> Tensor:
    *stack, outputs, inputs = data.shape
    source = data.contiguous().view(torch.uint8).view(-1, outputs, inputs)
    out = torch.empty(*stack, inputs, outputs, device=data.device, dtype=torch.uint8)
    if source.numel():
        grid = (triton.cdiv(inputs, BLOCK), triton.cdiv(outputs, BLOCK), len(source))
        _transpose_bytes[grid](source, out, outputs, inputs)
    return out.view(data.dtype)


def _launch(part: WeightPart, block: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, ...], dict[str, bool]]:
    """Returns launch grid, size arguments and constants of the kernels that process one range of a weight.

    The grid has the blocks along I and the block rows of the range. `ROUND`: values are rounded to bf16 first.
    `ALIGNED`: the range is aligned to 16 elements, which allows wide stores.
    """
    assert part.values.dtype is torch.float32 and part.dtype in (torch.float32, torch.bfloat16), f"{part.dtype}"
    assert block == (BLOCK, BLOCK), f"blocks of {block}"
    outputs, inputs = part.shape[-2:]
    blocks_o = triton.cdiv(outputs, BLOCK)

    def block_row(element: int) -> int:
        matrix, row = divmod(element // inputs, outputs)
        return matrix * blocks_o + row // BLOCK

    first, last = block_row(part.start), block_row(part.start + len(part.values) - 1)
    sizes = part.start, len(part.values), outputs, inputs, first
    aligned = all(size % _ALIGNMENT.value == 0 for size in (part.start, len(part.values), inputs))
    constants = {"ROUND": part.dtype is torch.bfloat16, "ALIGNED": aligned}
    return (triton.cdiv(inputs, BLOCK), last - first + 1), sizes, constants


@triton.jit
def _load_block(values_ptr, start, count, outputs, inputs, first, ROUND: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads the program's block: (values in fp32, 0 outside of the range; offset of the block in the range; offsets in
    the block; whether an element is in the range; matrix; block row in the matrix)."""
    block_row = first + tl.program_id(1)
    blocks_o = tl.cdiv(outputs, LENGTH)
    matrix, block_o = block_row // blocks_o, block_row % blocks_o
    each, column = tl.arange(0, LENGTH), tl.program_id(0) * LENGTH
    first_row = matrix.to(tl.int64) * outputs + block_o * LENGTH
    base = first_row * inputs + column - start
    # offsets in a block fit into 32 bits, which halves their registers
    positions = each[:, None] * inputs + each[None, :]
    low = tl.minimum(tl.maximum(-base, 0), _FAR).to(tl.int32)
    high = tl.minimum(tl.maximum(count - base, 0), _FAR).to(tl.int32)
    if ALIGNED:
        low, high = tl.multiple_of(low, _ALIGNMENT), tl.multiple_of(high, _ALIGNMENT)
    inside = (block_o * LENGTH + each < outputs)[:, None] & (column + each < inputs)[None, :]
    mask = inside & (positions >= low) & (positions < high)
    x = tl.load(values_ptr + base + positions, mask=mask, other=0.0)
    if ROUND:  # `optimizer_state.round_weights`: to nearest, ties away from zero
        away = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, away, x)
    return x, base, positions, mask, matrix, block_o


@triton.jit(do_not_specialize=["first"])
def _weight_amax(
    values_ptr, amax_ptr, start, count, outputs, inputs, first, stride_e, stride_o, stride_i,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    x, _, _, _, matrix, block_o = _load_block(values_ptr, start, count, outputs, inputs, first, ROUND, ALIGNED)
    bits = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    pointers = amax_ptr + matrix * stride_e + block_o * stride_o + tl.program_id(0) * stride_i + tl.arange(0, 1)
    # no atomics are needed: one program per launch processes this block, and launches run one after the other
    before = tl.load(pointers).to(tl.int32, bitcast=True)
    tl.store(pointers, tl.maximum(before, bits).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["first"])
def _quantize_part(
    values_ptr, factors_ptr, out_ptr, start, count, outputs, inputs, first, stride_e, stride_o, stride_i,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    x, base, positions, mask, matrix, block_o = _load_block(
        values_ptr, start, count, outputs, inputs, first, ROUND, ALIGNED
    )
    pointers = factors_ptr + matrix * stride_e + block_o * stride_o + tl.program_id(0) * stride_i + tl.arange(0, 1)
    factor = tl.load(pointers)
    tl.store(out_ptr + base + positions, (x * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _transpose_bytes(source_ptr, out_ptr, outputs, inputs):
    matrix = tl.program_id(2).to(tl.int64) * outputs * inputs
    row, column, each = tl.program_id(1) * LENGTH, tl.program_id(0) * LENGTH, tl.arange(0, LENGTH)
    in_rows, in_columns = row + each < outputs, column + each < inputs
    source_ptr += matrix + row.to(tl.int64) * inputs + column
    mask = in_rows[:, None] & in_columns[None, :]
    x = tl.load(source_ptr + each[:, None] * inputs + each[None, :], mask=mask, other=0)
    out_ptr += matrix + column.to(tl.int64) * outputs + row
    mask = in_columns[:, None] & in_rows[None, :]
    tl.store(out_ptr + each[:, None] * outputs + each[None, :], tl.trans(x), mask=mask)
