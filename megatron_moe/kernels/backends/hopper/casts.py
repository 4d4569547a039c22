"""Rowwise and columnwise FP8 copies of rows in one pass, with scales per 1x128 block, in Gluon.

The Triton kernel loads every tile twice, because it cannot keep a tile in shared memory. Here a tile of 128x128
elements is loaded once and asynchronously, and read from shared memory along rows and along columns without bank
conflicts.
"""

from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language import PropagateNan

from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.backends.triton import activation, quantize
from megatron_moe.kernels.backends.triton.launch import cdiv
from megatron_moe.precision.quantized_tensor import QuantizedCopy

LENGTH = gl.constexpr(quantize.BLOCK)
BAND = 8
"""Number of column blocks that consecutive programs process before they continue with the next rows. If tokens are
gathered, the band of all tokens stays in the L2 cache, since each token is read once per choice."""
WARPS = 8
_ALL = gl.constexpr(PropagateNan.ALL)
_MANTISSA = gl.constexpr(0x7FFFFF)
_INF, _NAN = gl.constexpr(0x7F800000), gl.constexpr(0x7FC00000)


def columnwise_copy(
    x_TK: Tensor,
    token_R: Tensor | None,
    num_rows: int,
    row: QuantizedCopy | None,
    fmt: OperandFormat,
    offsets_e: Tensor | None,
) -> QuantizedCopy:
    """See `quantize.columnwise_copy`, which makes the copies if sizes or addresses are not multiples of 16, as Triton
    requires to copy 16 bytes at a time."""
    width = x_TK.shape[1]
    aligned = all(number % 16 == 0 for number in (width, x_TK.stride(0), x_TK.data_ptr()))
    if not aligned or x_TK.dtype is not torch.bfloat16:
        return quantize.columnwise_copy(x_TK, token_R, num_rows, row, fmt, offsets_e)
    blocks = None if offsets_e is None else quantize.row_blocks_of_experts(offsets_e, num_rows)
    data, scales, _ = quantize.empty_columns(num_rows, width, x_TK.device, fmt, blocks)
    if num_rows and width:
        out = row or QuantizedCopy(data, scales)  # placeholder if no rowwise copy is made
        _quantize_blocks[(BAND, len(scales), cdiv(width, BAND * quantize.BLOCK))](
            x_TK, token_R, out.data, out.scales, data, scales, blocks, num_rows, width, x_TK.stride(0), data.stride(0),
            ROWWISE=row is not None, **quantize.quantize_constants(fmt, x_TK.dtype), num_warps=WARPS,
        )  # fmt: skip
    return QuantizedCopy(data[:, :num_rows] if blocks is None else data, scales)


quantize_rows = partial(quantize.quantize_rows, make_columns=columnwise_copy)
quantize_permuted = partial(quantize.quantize_permuted, make_columns=columnwise_copy)
quantize_activation_grad = partial(activation.quantize_activation_grad, make_columns=columnwise_copy)
"""The Triton backend's op, with the columnwise copies made by this module's kernel."""


@gluon.jit
def _quantize_blocks(
    x_ptr, token_ptr, out_ptr, scales_ptr, across_ptr, across_scales_ptr, blocks_ptr, num_rows, width, stride,
    across_stride, ROWWISE: gl.constexpr, LARGEST: gl.constexpr, BOUND: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    # Along rows, eight threads read 16 bytes each, twice. Along columns, a thread reads 16 rows of two columns, so that
    # eight threads store 128 bytes. Column reads have no bank conflicts, because the swizzle differs between rows that
    # are 16 apart.
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    COLUMN: gl.constexpr = gl.BlockedLayout([16, 2], [8, 4], [1, gl.num_warps()], [0, 1])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=16, max_phase=8, order=[1, 0])
    element: gl.constexpr = across_ptr.dtype.element_ty
    block = gl.program_id(1).to(gl.int64)
    first_column = (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) * LENGTH
    left = width - first_column
    if blocks_ptr is None:
        first = block * LENGTH
        count = gl.minimum(num_rows - first, LENGTH).to(gl.int32)
    else:
        first = gl.load(blocks_ptr + 2 * block).to(gl.int64)
        count = gl.load(blocks_ptr + 2 * block + 1)
    # Offsets within a tile have 32 bits, which saves instructions: the kernel is limited by instructions, not by memory
    # bandwidth.
    rows, columns = gl.arange(0, LENGTH, gl.SliceLayout(1, ROW)), gl.arange(0, LENGTH, gl.SliceLayout(0, ROW))
    inside = (columns < left)[None, :]
    mask = (rows < count)[:, None] & inside
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [LENGTH, LENGTH], TILE)
    if token_ptr is None:
        source = x_ptr + first * stride + first_column + (rows[:, None] * stride + columns[None, :])
        async_copy.async_copy_global_to_shared(tile, source, mask=mask)
    else:
        tokens = gl.load(token_ptr + first + rows, mask=rows < count, other=-1)
        source = x_ptr + first_column + (tokens.to(gl.int64)[:, None] * stride + columns[None, :])
        async_copy.async_copy_global_to_shared(tile, source, mask=(tokens >= 0)[:, None] & inside)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    if ROWWISE:
        x = tile.load(ROW).to(gl.float32)
        scale, inverse = _scales_of(_amax_bits(x, 1), LARGEST, BOUND, POWER_OF_TWO)
        pointers = out_ptr + first * width + first_column + (rows[:, None] * width + columns[None, :])
        gl.store(pointers, (x * scale[:, None]).to(element), mask=mask)
        pointers = scales_ptr + gl.program_id(2).to(gl.int64) * gl.num_programs(0) * num_rows
        pointers += gl.program_id(0).to(gl.int64) * num_rows + first
        gl.store(pointers + rows, inverse, mask=(rows < count) & (left > 0))
    x = tile.load(COLUMN).to(gl.float32)
    scale, inverse = _scales_of(_amax_bits(x, 0), LARGEST, BOUND, POWER_OF_TWO)
    rows, columns = gl.arange(0, LENGTH, gl.SliceLayout(1, COLUMN)), gl.arange(0, LENGTH, gl.SliceLayout(0, COLUMN))
    mask = (columns < left) & (count > 0)
    pointers = across_ptr + first_column.to(gl.int64) * across_stride + block * LENGTH
    pointers += columns[None, :] * across_stride + rows[:, None]
    gl.store(pointers, (x * scale[None, :]).to(element), mask=mask[None, :])
    gl.store(across_scales_ptr + block * width + first_column + columns, inverse, mask=mask)


@gluon.jit
def _amax_bits(x, axis: gl.constexpr):
    """Bits of the largest magnitude along an axis; those of NaN if an element is NaN."""
    return gl.reduce(gl.abs(x), axis, _larger).to(gl.int32, bitcast=True)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def _scales_of(amax_bits, LARGEST: gl.constexpr, BOUND: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """See `quantize.scales_of`."""
    usable = (amax_bits > 0) & (amax_bits < _INF)
    if POWER_OF_TWO:
        largest: gl.constexpr = 8 if LARGEST == 448.0 else 15
        above = ((amax_bits & _MANTISSA) > 0x600000).to(gl.int32)
        exponent = gl.minimum(254 + largest - (amax_bits >> 23) - above, 254)
        exponent = gl.where(usable, exponent, 127)
        inverse = gl.where(exponent == 254, 1 << 22, (254 - exponent) << 23)  # 2^-127 is subnormal
        inverse = gl.where(amax_bits < _INF, inverse, _NAN)
        return (exponent << 23).to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)
    else:
        amax = gl.where(usable, amax_bits, 0x3F800000).to(gl.float32, bitcast=True)
        scale = gl.minimum(gl.div_rn(amax * 0 + LARGEST, amax), BOUND)
        scale = gl.where(usable, scale, 1.0)
        return scale, gl.where(amax_bits < _INF, gl.div_rn(scale * 0 + 1.0, scale), float("nan"))
