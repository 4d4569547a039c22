"""bf16 grouped GEMM: multiplies each expert's rows by its weight. One launch computes all experts; the kernel reads the
row offsets on the device."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megatron_moe.kernels.backends.hopper.tiles import (
    accumulate_mma,
    aligned,
    blocks_of,
    finish_mma,
    first_tile_of_program,
    index_in_slice,
    new_barriers,
    rows_by_slice,
    tile_origin,
    tiles_of,
    zeros,
)
from megatron_moe.kernels.backends.triton.launch import num_free_sms

ROWS_OF_HALF = gl.constexpr(64)
"""Rows of a tile per warpgroup. If an expert's last tile has no rows for the second warpgroup, that warpgroup skips its
MMA, so at most half a tile is computed for padding."""
DEPTH = 64
"""Elements of the reduction dimension per pipeline stage."""


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _multiply(rows, weight, offsets_e, transposed=True)


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _multiply(grad, weight, offsets_e, transposed=False)


def _multiply(rows: Tensor, weight: Tensor, offsets_e: Tensor, *, transposed: bool) -> Tensor:
    """Grouped GEMM of rows [R, D] and weight [e, D, C], or [e, C, D] if `transposed`, -> [R, C]."""
    num_experts, depth, columns = (len(weight), *(weight.shape[:0:-1] if transposed else weight.shape[1:]))
    out = torch.empty(len(rows), columns, device=rows.device, dtype=rows.dtype)
    if out.numel() == 0 or depth == 0:
        return out.zero_()
    rows, weight = aligned(rows, "rows"), aligned(weight, "weights")
    # wider tiles need fewer loads, but are used only if they divide the columns
    tile_columns, stages = (256, 3) if columns % 256 == 0 else (128, 5)
    matrices = weight.view(-1, weight.shape[2]) if weight.is_contiguous() else weight.flatten(0, 1)
    block = [tile_columns, DEPTH] if transposed else [DEPTH, tile_columns]
    _grouped_gemm[(num_free_sms(rows.device),)](
        blocks_of(rows, [ROWS_OF_HALF.value, DEPTH]), blocks_of(matrices, block),
        rows_by_slice(aligned(out, "results"), [ROWS_OF_HALF.value, tile_columns]), offsets_e,
        num_experts, depth, columns, TRANSPOSED=transposed, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=("num_experts", "depth", "columns"))
def _grouped_gemm(
    rows, weight, out, offsets_ptr, num_experts, depth, columns, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr
):
    rows_stages = gl.allocate_shared_memory(rows.dtype, [2 * STAGES] + rows.block_type.shape, rows.layout)
    weight_stages = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)
    results = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    full, empty = new_barriers(STAGES)
    shape = (offsets_ptr, num_experts, depth, columns)
    stages = (rows_stages, weight_stages, full, empty)
    gl.warp_specialize(
        [
            (_sum_tiles, (gl.constexpr(0), out, results, stages, shape, TRANSPOSED)),
            (_sum_tiles, (gl.constexpr(1), out, results, stages, shape, TRANSPOSED)),
            (_load_tiles, (rows, weight, stages, shape, TRANSPOSED)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_tiles(rows, weight, stages, shape, TRANSPOSED: gl.constexpr):
    rows_stages, weight_stages, full, empty = stages
    offsets_ptr, num_experts, depth, columns = shape
    STAGES: gl.constexpr = full.shape[0]
    TILE_COLUMNS: gl.constexpr = weight.block_type.shape[0] if TRANSPOSED else weight.block_type.shape[1]
    STEP: gl.constexpr = rows.block_type.shape[1]
    before = 0
    step = 0
    for expert in range(num_experts):
        start, end, num_down, num_tiles = tiles_of(expert, offsets_ptr, columns, TILE_COLUMNS)
        first = before
        # count tiles over all experts: Triton 3.6 drops a loop-carried sum that is used only as a loop bound
        before += num_tiles
        for number in range(first_tile_of_program(first), before, gl.num_programs(0)):
            row, column = tile_origin(number - first, start, num_down, columns, TILE_COLUMNS)
            both = end - row > ROWS_OF_HALF
            for k in range(0, depth, STEP):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                bar = full.index(stage)
                one: gl.constexpr = rows.block_type.nbytes + weight.block_type.nbytes
                mbarrier.expect(bar, one + rows.block_type.nbytes, pred=both)
                mbarrier.expect(bar, one, pred=both == False)  # noqa: E712
                tma.async_copy_global_to_shared(rows, [row, k], bar, rows_stages.index(2 * stage))
                lower = row + ROWS_OF_HALF
                tma.async_copy_global_to_shared(rows, [lower, k], bar, rows_stages.index(2 * stage + 1), pred=both)
                if TRANSPOSED:
                    origin = [expert * columns + column, k]
                else:
                    origin = [expert * depth + k, column]
                tma.async_copy_global_to_shared(weight, origin, bar, weight_stages.index(stage))
                step += 1


@gluon.jit
def _sum_tiles(HALF: gl.constexpr, out, results, stages, shape, TRANSPOSED: gl.constexpr):
    rows_stages, weight_stages, full, empty = stages
    offsets_ptr, num_experts, depth, columns = shape
    STAGES: gl.constexpr = full.shape[0]
    TILE_COLUMNS: gl.constexpr = weight_stages.shape[1] if TRANSPOSED else weight_stages.shape[2]
    STEP: gl.constexpr = rows_stages.shape[2]
    result = results.index(HALF)
    before = 0
    step = 0
    for expert in range(num_experts):
        start, end, num_down, num_tiles = tiles_of(expert, offsets_ptr, columns, TILE_COLUMNS)
        first = before
        before += num_tiles
        for number in range(first_tile_of_program(first), before, gl.num_programs(0)):
            row, column = tile_origin(number - first, start, num_down, columns, TILE_COLUMNS)
            row += HALF * ROWS_OF_HALF
            if row < end:
                total = zeros(ROWS_OF_HALF, TILE_COLUMNS)
                for k in range(0, depth, STEP):
                    stage = step % STAGES
                    matrix = weight_stages.index(stage)
                    if TRANSPOSED:
                        matrix = matrix.permute((1, 0))
                    total = accumulate_mma(
                        total, rows_stages.index(2 * stage + HALF), matrix, step, k == 0, full, empty
                    )
                    step += 1
                total = finish_mma(total, step, True, full, empty)
                tma.store_wait(0)  # waits until the previous store has read this buffer
                result.reshape((ROWS_OF_HALF, TILE_COLUMNS)).store(total.to(out.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, index_in_slice(row, end, column), result)
            else:
                for _ in range(0, depth, STEP):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
    tma.store_wait(0)
