"""Expert weight gradients of block-scaled FP8 operands: both have 1x128 scales along the rows (tokens); fp32 results.

Reads the columnwise (transposed) copies, in which block b of 128 rows, counted across all experts, starts at column 128
b. As in `fp8_grouped_gemm`, each warpgroup multiplies one block of 128 rows into a fresh accumulator and adds the
scaled partial result to sums in fp32 registers. TMA writes the result to the gradient buffer or adds it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_moe.kernels.backends.hopper.tiles import (
    ROWS_OF_TILE,
    add_block,
    aligned,
    blocks_of,
    expert_row_range,
    first_tile_of_program,
    new_barriers,
    scales_of,
    split_columns,
    tile_origin,
)
from megatron_moe.kernels.backends.hopper.weight_grad import MOST_PARTS
from megatron_moe.kernels.backends.triton import experts
from megatron_moe.kernels.backends.triton.launch import num_free_sms
from megatron_moe.kernels.backends.triton.quantize import dequantize_columns
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.precision.quantized_tensor import QuantizedTensor

CHUNK = gl.constexpr(64)
"""Output channels per MMA."""
CHUNKS = gl.constexpr(4)
"""Chunks of a tile, two per warpgroup."""
OUTPUTS = gl.constexpr(256)
"""Output channels of a tile."""
INPUTS = gl.constexpr(128)
"""Input channels of a tile."""
ROWS = gl.constexpr(128)
"""Rows per pipeline stage: one scale block. The rows of an expert are padded to a multiple."""
STAGES = 3


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. For bf16 gradient buffers, the bf16 Triton kernel multiplies dequantised
    operands, because this kernel would round the sum in the buffer once per launch."""
    if out.dtype is not torch.float32:
        experts.grouped_weight_grad([_dequantized(part) for part in parts], out, accumulate)
        return
    assert out.is_contiguous() and aligned(out, "weight gradients") is out, f"{out.shape} {out.stride()}"
    mask = [part for part in parts if _columnwise(part.rows)[0].numel()]
    if not mask and not accumulate:
        out.zero_()
    for start in range(0, len(mask), MOST_PARTS):
        _launch(mask[start : start + MOST_PARTS], out, accumulate or start > 0)


def _dequantized(part: GroupedPart[MatrixOperand]) -> GroupedPart[Tensor]:
    """Converts a part to bf16. Padding between the experts becomes rows of 0."""
    assert isinstance(part.grad, QuantizedTensor) and isinstance(part.rows, QuantizedTensor)
    ends = part.offsets_e
    if len(ends) > 1:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        ends = ((counts + ROWS.value - 1) // ROWS.value * ROWS.value).cumsum(0, dtype=torch.int32)
    return GroupedPart(dequantize_columns(part.grad), dequantize_columns(part.rows), ends)


def _launch(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    num_experts, outputs, inputs = out.shape
    if out.numel() == 0:
        return
    _fp8_expert_grads[(num_free_sms(out.device),)](
        *_described(parts[0]), *_described(parts[-1]), blocks_of(out, [1, CHUNK.value, INPUTS.value // 4]),
        num_experts, outputs, inputs, PARTS=len(parts), ADD=accumulate, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


def _described(part: GroupedPart[MatrixOperand]) -> tuple[TensorDescriptor | Tensor, ...]:
    grad, grad_scales = _columnwise(part.grad)
    rows, rows_scales = _columnwise(part.rows)
    return (
        blocks_of(grad, [CHUNK.value, ROWS.value]), scales_of(grad_scales, OUTPUTS.value),
        blocks_of(rows, [INPUTS.value, ROWS.value]), scales_of(rows_scales, INPUTS.value), part.offsets_e,
    )  # fmt: skip


def _columnwise(operand: MatrixOperand) -> tuple[Tensor, Tensor]:
    """Transposed elements [C, R] and their scales. Copies the elements if their rows do not start at multiples of
    16 bytes, which TMA requires."""
    assert isinstance(operand, QuantizedTensor) and operand.block == (1, ROWS.value), f"{type(operand)}"
    data, scales, _ = operand.column_copy
    if data.stride(0) % 16 or data.stride(1) != 1 or data.data_ptr() % 16:
        num_rows = data.shape[1]
        data = F.pad(data.view(torch.uint8), (0, -num_rows % 16))[:, :num_rows].view(data.dtype)
    return data, scales


@gluon.jit(do_not_specialize=("num_experts", "outputs", "inputs"))
def _fp8_expert_grads(
    grad0, grad_scales0, rows0, rows_scales0, offsets0_ptr, grad1, grad_scales1, rows1, rows_scales1, offsets1_ptr,
    out, num_experts, outputs, inputs, PARTS: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weight gradients of all experts, summed over one or two microbatches (`PARTS`)."""
    offsets = (offsets0_ptr, offsets1_ptr)
    loads = ((grad0, grad_scales0, rows0, rows_scales0), (grad1, grad_scales1, rows1, rows_scales1))
    grad_stages = gl.allocate_shared_memory(grad0.dtype, [CHUNKS * STAGES] + grad0.block_type.shape, grad0.layout)
    rows_stages = gl.allocate_shared_memory(rows0.dtype, [STAGES] + rows0.block_type.shape, rows0.layout)
    # four buffers per warpgroup: while the next quarter of a chunk is written, earlier ones are stored
    results = gl.allocate_shared_memory(out.dtype, [8] + out.block_type.shape, out.layout)
    SCALES: gl.constexpr = grad_scales0.layout
    grad_scales_stages = gl.allocate_shared_memory(gl.float32, [STAGES] + grad_scales0.block_type.shape, SCALES)
    rows_scales_stages = gl.allocate_shared_memory(gl.float32, [STAGES] + rows_scales0.block_type.shape, SCALES)
    full, empty = new_barriers(STAGES)
    stages = (grad_stages, rows_stages, grad_scales_stages, rows_scales_stages, full, empty)
    shape = (num_experts, outputs, inputs)
    gl.warp_specialize(
        [
            (_sum_tiles, (gl.constexpr(0), out, results, offsets, stages, shape, PARTS, ADD)),
            (_sum_tiles, (gl.constexpr(1), out, results, offsets, stages, shape, PARTS, ADD)),
            (_load_tiles, (loads, offsets, stages, shape, PARTS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _num_tiles(shape):
    """Number of tiles of an expert."""
    _, outputs, inputs = shape
    return gl.cdiv(outputs, OUTPUTS) * gl.cdiv(inputs, INPUTS)


@gluon.jit
def _offsets(tile, shape):
    """Returns (first output channel, first input channel) of an expert's tile."""
    _, outputs, inputs = shape
    output, input = tile_origin(tile, 0, gl.cdiv(outputs, OUTPUTS), inputs, INPUTS)
    return output * (OUTPUTS // ROWS_OF_TILE), input


@gluon.jit
def _num_blocks(offsets, expert):
    """Number of an expert's row blocks, per part."""
    start0, end0 = expert_row_range(offsets[0], expert)
    start1, end1 = expert_row_range(offsets[1], expert)
    return gl.cdiv(end0 - start0, ROWS), gl.cdiv(end1 - start1, ROWS)


@gluon.jit
def _load_tiles(loads, offsets, stages, shape, PARTS: gl.constexpr):
    grad_stages, rows_stages, grad_scales_stages, rows_scales_stages, full, empty = stages
    STAGES: gl.constexpr = full.shape[0]
    num_tiles = _num_tiles(shape)
    before0 = 0
    before1 = 0
    step = 0
    for expert in range(shape[0]):
        num_blocks = _num_blocks(offsets, expert)
        first = (before0, before1)
        before0 += num_blocks[0]
        before1 += num_blocks[1]
        start = expert * num_tiles
        for number in range(first_tile_of_program(start), start + num_tiles, gl.num_programs(0)):
            output, input = _offsets(number - start, shape)
            for part in gl.static_range(PARTS):
                grad, grad_scales, rows, rows_scales = loads[part]
                for number_of_block in range(num_blocks[part]):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                    bar = full.index(stage)
                    mbarrier.expect(bar, (ROWS + 4) * (OUTPUTS + INPUTS))  # 1 byte per element, 4 bytes per scale
                    # Triton 3.6 drops the updates of a loop-carried value that is used only as a loop bound
                    block = first[part] + number_of_block
                    row = block * ROWS
                    tma.async_copy_global_to_shared(rows, [input, row], bar, rows_stages.index(stage))
                    for chunk in gl.static_range(CHUNKS):
                        origin = [output + chunk * CHUNK, row]
                        tma.async_copy_global_to_shared(grad, origin, bar, grad_stages.index(CHUNKS * stage + chunk))
                    tma.async_copy_global_to_shared(grad_scales, [block, output], bar, grad_scales_stages.index(stage))
                    tma.async_copy_global_to_shared(rows_scales, [block, input], bar, rows_scales_stages.index(stage))
                    step += 1


@gluon.jit
def _sum_tiles(NUMBER: gl.constexpr, out, results, offsets, stages, shape, PARTS: gl.constexpr, ADD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, INPUTS, 32])
    full, empty = stages[4], stages[5]
    STAGES: gl.constexpr = full.shape[0]
    num_tiles = _num_tiles(shape)
    step = 0
    for expert in range(shape[0]):
        num_blocks = _num_blocks(offsets, expert)
        end = num_blocks[0]
        if PARTS == 2:
            end += num_blocks[1]
        start = expert * num_tiles
        for number in range(first_tile_of_program(start), start + num_tiles, gl.num_programs(0)):
            output, input = _offsets(number - start, shape)
            output += NUMBER * 2 * CHUNK
            upper = gl.zeros((CHUNK, INPUTS), dtype=gl.float32, layout=LAYOUT)
            lower = gl.zeros((CHUNK, INPUTS), dtype=gl.float32, layout=LAYOUT)
            for _ in range(end):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                upper = _add_block(NUMBER, 0, upper, stage, stages)
                lower = _add_block(NUMBER, 1, lower, stage, stages)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            _store(NUMBER, out, results, upper, expert, output, input, ADD)
            _store(NUMBER, out, results, lower, expert, output + CHUNK, input, ADD)
    tma.store_wait(0)


@gluon.jit
def _add_block(NUMBER: gl.constexpr, CHUNK_NUMBER: gl.constexpr, total, stage, stages):
    """Adds the scaled product of a stage's row block to the sums of a chunk, fp32 [CHUNK, INPUTS]."""
    grad_stages, rows_stages, grad_scales_stages, rows_scales_stages, full, empty = stages
    LAYOUT: gl.constexpr = total.type.layout
    number: gl.constexpr = 2 * NUMBER + CHUNK_NUMBER
    rows = rows_stages.index(stage).permute((1, 0))
    partial = gl.zeros((CHUNK, INPUTS), dtype=gl.float32, layout=LAYOUT)
    partial = warpgroup_mma(grad_stages.index(CHUNKS * stage + number), rows, partial, use_acc=False, is_async=True)
    down = grad_scales_stages.index(stage).reshape((OUTPUTS,)).slice(number * CHUNK, CHUNK)
    down_scales = down.load(gl.SliceLayout(1, LAYOUT))
    across_scales = rows_scales_stages.index(stage).reshape((INPUTS,)).load(gl.SliceLayout(0, LAYOUT))
    partial = warpgroup_mma_wait(0, deps=(partial,))
    total += partial * across_scales[None, :] * down_scales[:, None]
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _store(NUMBER: gl.constexpr, out, results, sums, expert, output, input, ADD: gl.constexpr):
    """Stores or adds a chunk of results asynchronously, through four buffers of the warpgroup in shared memory."""
    QUARTER: gl.constexpr = INPUTS // 4
    left, right = split_columns(sums)
    quarters = split_columns(left) + split_columns(right)
    for quarter in gl.static_range(4):
        result = results.index(4 * NUMBER + quarter)
        tma.store_wait(3)  # waits until an earlier store has read this buffer
        result.reshape((CHUNK, QUARTER)).store(quarters[quarter])
        fence_async_shared()
        origin = [expert, output, input + quarter * QUARTER]
        if ADD:
            add_block(out, origin, result)
        else:
            tma.async_copy_shared_to_global(out, origin, result)
