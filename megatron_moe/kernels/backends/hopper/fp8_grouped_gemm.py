"""Grouped GEMM of block-scaled FP8 operands: 1x128 scales for the rows, 128x128 scales for the weights, bf16 results.

Tensor cores sum FP8 products with about 14 bits, so longer sums are kept in fp32 registers: each warpgroup multiplies
one block of 128 elements into a fresh accumulator and adds the scaled partial result to its sums (DeepSeek-V3, arXiv
2412.19437, section 3.3.2). While one warpgroup adds, the other one multiplies. FP8 tensor cores read operands along the
reduction dimension only, so the input gradient needs transposed weights.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megatron_moe.kernels.backends.hopper.tiles import (
    aligned,
    blocks_of,
    first_tile_of_program,
    index_in_slice,
    new_barriers,
    rows_by_slice,
    tile_origin,
    tiles_of,
)
from megatron_moe.kernels.backends.triton.launch import num_sms
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor

CHUNK = gl.constexpr(64)
"""Rows per MMA. A tile has two chunks; the second one is skipped if the expert has no rows for it."""
HALF = gl.constexpr(128)
"""Columns of a tile per warpgroup: one scale block of the weights."""
DEPTH = gl.constexpr(128)
"""Elements of the reduction dimension per pipeline stage: one scale block."""
STAGES = 3


def quantized_grouped_forward(rows: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    """See `Kernels.grouped_forward`. Reads the rowwise copies of both operands."""
    return multiply(rows, weight.row_copy, offsets_e)


def quantized_grouped_input_grad(grad: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    """See `Kernels.grouped_input_grad`. Reads the rowwise gradient and the columnwise weights."""
    return multiply(grad, weight.column_copy, offsets_e)


def multiply(rows: QuantizedTensor, weight: QuantizedCopy, offsets_e: Tensor) -> Tensor:
    """Multiplies rows grouped by expert: rows [R, D] in blocks of 1x128 and weights [e, C, D] in blocks of 128x128 ->
    bf16 [R, C]."""
    assert rows.block == (1, DEPTH.value), f"{rows.block}"
    data, scales, _ = rows.row_copy
    num_experts, columns, depth = weight.data.shape
    out = torch.empty(len(data), columns, device=data.device, dtype=torch.bfloat16)
    if out.numel() == 0 or depth == 0:
        return out.zero_()
    _fp8_grouped_gemm[(num_sms(out.device),)](
        blocks_of(aligned(data, "rows"), [CHUNK.value, DEPTH.value]), scales.contiguous(),
        blocks_of(aligned(weight.data.flatten(0, 1), "weights"), [HALF.value, DEPTH.value]), weight.scales.contiguous(),
        rows_by_slice(aligned(out, "results"), [CHUNK.value, HALF.value]), offsets_e,
        len(out), num_experts, depth, columns, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=("num_rows", "num_experts", "depth", "columns"))
def _fp8_grouped_gemm(
    rows, row_scales_ptr, weight, weight_scales_ptr, out, offsets_ptr, num_rows, num_experts, depth, columns,
    STAGES: gl.constexpr,
):  # fmt: skip
    rows_stages = gl.allocate_shared_memory(rows.dtype, [2 * STAGES] + rows.block_type.shape, rows.layout)
    weight_stages = gl.allocate_shared_memory(weight.dtype, [2 * STAGES] + weight.block_type.shape, weight.layout)
    results = gl.allocate_shared_memory(out.dtype, [4] + out.block_type.shape, out.layout)
    full, empty = new_barriers(STAGES)
    shape = (offsets_ptr, num_experts, depth, columns)
    scales = (row_scales_ptr, num_rows, weight_scales_ptr)
    stages = (rows_stages, weight_stages, full, empty)
    gl.warp_specialize(
        [
            (_sum_tiles, (gl.constexpr(0), out, results, stages, scales, shape)),
            (_sum_tiles, (gl.constexpr(1), out, results, stages, scales, shape)),
            (_load_tiles, (rows, weight, stages, shape)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_tiles(rows, weight, stages, shape):
    rows_stages, weight_stages, full, empty = stages
    offsets_ptr, num_experts, depth, columns = shape
    STAGES: gl.constexpr = full.shape[0]
    before = 0
    step = 0
    for expert in range(num_experts):
        start, end, num_down, num_tiles = tiles_of(expert, offsets_ptr, columns, 2 * HALF)
        first = before
        before += num_tiles
        for number in range(first_tile_of_program(first), before, gl.num_programs(0)):
            row, column = tile_origin(number - first, start, num_down, columns, 2 * HALF)
            lower = end - row > CHUNK
            right = columns - column > HALF
            for k in range(0, depth, DEPTH):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                bar = full.index(stage)
                _expect(bar, rows.block_type.nbytes, weight.block_type.nbytes, lower, right)
                tma.async_copy_global_to_shared(rows, [row, k], bar, rows_stages.index(2 * stage))
                offsets = expert * columns + column
                tma.async_copy_global_to_shared(weight, [offsets, k], bar, weight_stages.index(2 * stage))
                below, after = rows_stages.index(2 * stage + 1), weight_stages.index(2 * stage + 1)
                tma.async_copy_global_to_shared(weight, [offsets + HALF, k], bar, after, pred=right)
                tma.async_copy_global_to_shared(rows, [row + CHUNK, k], bar, below, pred=lower)
                step += 1


@gluon.jit
def _expect(bar, ROWS: gl.constexpr, WEIGHT: gl.constexpr, lower, right):
    """Sets the number of bytes that a stage's barrier expects: `ROWS` bytes, twice if `lower`, plus `WEIGHT` bytes,
    twice if `right`. Gluon requires the number to be a constant."""
    mbarrier.expect(bar, ROWS + WEIGHT, pred=(lower | right) == False)  # noqa: E712
    mbarrier.expect(bar, 2 * ROWS + WEIGHT, pred=lower & (right == False))  # noqa: E712
    mbarrier.expect(bar, ROWS + 2 * WEIGHT, pred=(lower == False) & right)  # noqa: E712
    mbarrier.expect(bar, 2 * ROWS + 2 * WEIGHT, pred=lower & right)


@gluon.jit
def _sum_tiles(NUMBER: gl.constexpr, out, results, stages, scales, shape):
    rows_stages, weight_stages, full, empty = stages
    offsets_ptr, num_experts, depth, columns = shape
    row_scales_ptr, num_rows, weight_scales_ptr = scales
    STAGES: gl.constexpr = full.shape[0]
    num_deep = gl.cdiv(depth, DEPTH)
    before = 0
    step = 0
    for expert in range(num_experts):
        start, end, num_down, num_tiles = tiles_of(expert, offsets_ptr, columns, 2 * HALF)
        first = before
        before += num_tiles
        for number in range(first_tile_of_program(first), before, gl.num_programs(0)):
            row, column = tile_origin(number - first, start, num_down, columns, 2 * HALF)
            column += NUMBER * HALF
            if column < columns:
                block = expert * gl.cdiv(columns, HALF) + column // HALF
                positions = (row_scales_ptr + row, num_rows - row, num_rows, weight_scales_ptr + block * num_deep)
                if end - row > CHUNK:
                    sums = _sum_chunks(NUMBER, 2, positions, num_deep, step, rows_stages, weight_stages, full, empty)
                    _store(out, results.index(2 * NUMBER), sums[0], row, end, column)
                    _store(out, results.index(2 * NUMBER + 1), sums[1], row + CHUNK, end, column)
                else:
                    sums = _sum_chunks(NUMBER, 1, positions, num_deep, step, rows_stages, weight_stages, full, empty)
                    _store(out, results.index(2 * NUMBER), sums[0], row, end, column)
                step += num_deep
            else:
                for _ in range(num_deep):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
    tma.store_wait(0)


@gluon.jit
def _row_scales(positions, k, chunk, num_deep, LAYOUT: gl.constexpr):
    """Scales of a chunk's rows for block k of the reduction dimension; 0 beyond the last block and the last row."""
    scales_ptr, num_rows_left, stride, _ = positions
    row = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(scales_ptr + k * stride + row, mask=(row < num_rows_left) & (k < num_deep), other=0.0)


@gluon.jit
def _sum_chunks(
    NUMBER: gl.constexpr, CHUNKS: gl.constexpr, positions, num_deep, step, rows_stages, weight_stages, full, empty
):
    """Computes the sums of one or two chunks of a tile, each fp32 [CHUNK, HALF]."""
    STAGES: gl.constexpr = full.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 32])
    upper = gl.zeros((CHUNK, HALF), dtype=gl.float32, layout=LAYOUT)
    lower = gl.zeros((CHUNK, HALF), dtype=gl.float32, layout=LAYOUT)
    partial = gl.zeros((CHUNK, HALF), dtype=gl.float32, layout=LAYOUT)
    # scales of the next block are loaded as soon as those of this block were used
    scale = gl.load(positions[3])
    upper_scales = _row_scales(positions, 0, 0, num_deep, LAYOUT)
    if CHUNKS == 2:
        lower_scales = _row_scales(positions, 0, 1, num_deep, LAYOUT)
    for k in range(num_deep):
        stage = step % STAGES
        weight = weight_stages.index(2 * stage + NUMBER).permute((1, 0))
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        partial = warpgroup_mma(rows_stages.index(2 * stage), weight, partial, use_acc=False, is_async=True)
        factors = upper_scales * scale
        upper_scales = _row_scales(positions, k + 1, 0, num_deep, LAYOUT)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        if CHUNKS == 2:
            upper += partial * factors[:, None]
            upper = warpgroup_mma_wait(0, deps=(upper,))
            partial = warpgroup_mma(rows_stages.index(2 * stage + 1), weight, partial, use_acc=False, is_async=True)
            factors = lower_scales * scale
            lower_scales = _row_scales(positions, k + 1, 1, num_deep, LAYOUT)
            scale = gl.load(positions[3] + k + 1, mask=k + 1 < num_deep, other=0.0)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(empty.index(stage), count=1)
            lower += partial * factors[:, None]
        else:
            scale = gl.load(positions[3] + k + 1, mask=k + 1 < num_deep, other=0.0)
            mbarrier.arrive(empty.index(stage), count=1)
            upper += partial * factors[:, None]
        step += 1
    return upper, lower


@gluon.jit
def _store(out, result, sums, row, end, column):
    """Stores a chunk of results asynchronously, through one of two buffers of the warpgroup in shared memory."""
    tma.store_wait(1)  # waits until an earlier store has read this buffer
    result.reshape((CHUNK, HALF)).store(sums.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, index_in_slice(row, end, column), result)
