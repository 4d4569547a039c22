"""Expert weight gradients of block-scaled FP8 operands: both have 1x128 scales along the rows (tokens); fp32 results.

Reads the columnwise (transposed) copies, in which block b of 128 rows, counted across all experts, starts at column 128
b. As in `fp8_product`, each block of 128 rows is multiplied into a fresh
accumulator, which is scaled and added to sums in fp32 registers. TMA writes the result to the gradient buffer or adds
it.
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

from megatron_moe.kernels.backends.hopper import weight_grad
from megatron_moe.kernels.backends.hopper.tiles import add_block, aligned, blocks_of, extent, halves, new_barriers
from megatron_moe.kernels.backends.triton import experts
from megatron_moe.kernels.backends.triton.launch import num_multiprocessors
from megatron_moe.kernels.backends.triton.quantize import dequantize_columns
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.precision.quantized_tensor import QuantizedTensor

HALF = gl.constexpr(64)
"""Output channels of a tile per warpgroup."""
INPUTS = gl.constexpr(128)
"""Input channels of a tile."""
ROWS = gl.constexpr(128)
"""Rows per pipeline stage: one scale block."""
STAGES = 6
FP8_KERNEL = False
"""Multiplies in FP8. False: in bf16, to which operands with power-of-two scales are dequantised exactly."""


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`."""
    if out.dtype is torch.float32 and FP8_KERNEL:
        _launch_all(parts, out, accumulate)
    else:
        plain = [_dequantized(part) for part in parts]
        in_bf16 = weight_grad if out.dtype is torch.float32 else experts
        in_bf16.grouped_weight_grad(plain, out, accumulate)


def _dequantized(part: GroupedPart[MatrixOperand]) -> GroupedPart[Tensor]:
    """The part in bf16, with the gaps between experts as rows of 0."""
    assert isinstance(part.grad, QuantizedTensor) and isinstance(part.rows, QuantizedTensor)
    ends = part.offsets_e
    if len(ends) > 1:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        ends = ((counts + ROWS.value - 1) // ROWS.value * ROWS.value).cumsum(0, dtype=torch.int32)
    return GroupedPart(dequantize_columns(part.grad), dequantize_columns(part.rows), ends)


def _launch_all(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    assert out.is_contiguous() and aligned(out, "weight gradients") is out, f"{out.shape} {out.stride()}"
    if out.numel() == 0:
        return
    held = [part for part in parts if _columnwise(part.rows)[0].numel()]
    if not held and not accumulate:
        out.zero_()
    for start in range(0, len(held), weight_grad.MOST_PARTS):
        several = held[start : start + weight_grad.MOST_PARTS]
        num_experts, outputs, inputs = out.shape
        _fp8_expert_grads[(num_multiprocessors(out.device),)](
            *_described(several[0]), *_described(several[-1]), blocks_of(out, [1, HALF.value, INPUTS.value // 4]),
            num_experts, outputs, inputs, PARTS=len(several), ADD=accumulate or start > 0, STAGES=STAGES, num_warps=4,
        )  # fmt: skip


def _described(part: GroupedPart[MatrixOperand]) -> tuple[TensorDescriptor, Tensor, TensorDescriptor, Tensor, Tensor]:
    grad, grad_scales = _columnwise(part.grad)
    rows, rows_scales = _columnwise(part.rows)
    return (
        blocks_of(grad, [HALF.value, ROWS.value]), grad_scales.contiguous(),
        blocks_of(rows, [INPUTS.value, ROWS.value]), rows_scales.contiguous(), part.offsets_e,
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
    grad0, grad_scales0_ptr, rows0, rows_scales0_ptr, offsets0_ptr,
    grad1, grad_scales1_ptr, rows1, rows_scales1_ptr, offsets1_ptr,
    out, num_experts, outputs, inputs, PARTS: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weight gradients of all experts, summed over two microbatches; if `PARTS` is 1, only the first one is used."""
    loads = ((grad0, grad1), (rows0, rows1), (offsets0_ptr, offsets1_ptr))
    scales = ((grad_scales0_ptr, grad_scales1_ptr), (rows_scales0_ptr, rows_scales1_ptr), (offsets0_ptr, offsets1_ptr))
    grad_stages = gl.allocate_shared_memory(grad0.dtype, [2 * STAGES] + grad0.block_type.shape, grad0.layout)
    rows_stages = gl.allocate_shared_memory(rows0.dtype, [STAGES] + rows0.block_type.shape, rows0.layout)
    # double-buffered per warpgroup: a quarter of the columns is stored while the next one is written
    results = gl.allocate_shared_memory(out.dtype, [4] + out.block_type.shape, out.layout)
    full, empty = new_barriers(STAGES)
    stages = (grad_stages, rows_stages, full, empty)
    shape = (num_experts, outputs, inputs)
    gl.warp_specialize(
        [
            (_sum_tiles, (gl.constexpr(0), out, results, scales, stages, shape, PARTS, ADD)),
            (_sum_tiles, (gl.constexpr(1), out, results, scales, stages, shape, PARTS, ADD)),
            (_load_tiles, (loads, stages, shape, PARTS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _num_tiles(shape):
    num_experts, outputs, inputs = shape
    return num_experts * gl.cdiv(outputs, 2 * HALF) * gl.cdiv(inputs, INPUTS)


@gluon.jit
def _place(number, shape):
    """Returns (expert, first output channel, first input channel) of tile `number`."""
    _, outputs, inputs = shape
    num_down = gl.cdiv(outputs, 2 * HALF)
    per_expert = num_down * gl.cdiv(inputs, INPUTS)
    tile = number % per_expert
    return number // per_expert, tile % num_down * (2 * HALF), tile // num_down * INPUTS


@gluon.jit
def _load_tiles(loads, stages, shape, PARTS: gl.constexpr):
    grads, rows, offsets = loads
    grad_stages, rows_stages, full, empty = stages
    STAGES: gl.constexpr = full.shape[0]
    step = 0
    last_expert = 0
    first_blocks = (0, 0)
    for number in range(gl.program_id(0), _num_tiles(shape), gl.num_programs(0)):
        expert, output, input = _place(number, shape)
        for passed in range(last_expert, expert):
            first_blocks = _after(offsets, passed, first_blocks, PARTS)
        last_expert = expert
        for part in gl.static_range(PARTS):
            start, end = extent(offsets[part], expert)
            first = first_blocks[part] * ROWS
            for row in range(first, first + end - start, ROWS):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, 2 * grads[part].block_type.nbytes + rows[part].block_type.nbytes)
                for half in gl.static_range(2):
                    place = [output + half * HALF, row]
                    tma.async_copy_global_to_shared(grads[part], place, bar, grad_stages.index(2 * stage + half))
                tma.async_copy_global_to_shared(rows[part], [input, row], bar, rows_stages.index(stage))
                step += 1


@gluon.jit
def _scales(scales_ptr, block, first, width, index, wanted):
    """Scales of row block `block` for the channels from `first` on; 0 from `width` on and if not `wanted`."""
    inside = (first + index < width) & wanted
    return gl.load(scales_ptr + block * width + first + index, mask=inside, other=0.0)


@gluon.jit
def _sum_tiles(NUMBER: gl.constexpr, out, results, scales, stages, shape, PARTS: gl.constexpr, ADD: gl.constexpr):
    grad_scales, rows_scales, offsets = scales
    grad_stages, rows_stages, full, empty = stages
    _, outputs, inputs = shape
    STAGES: gl.constexpr = full.shape[0]
    QUARTER: gl.constexpr = INPUTS // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, INPUTS, 32])
    down = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    # every thread needs 32 scales of columns: loaded coalesced, then distributed through shared memory
    across = gl.arange(0, INPUTS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    step = 0
    last_expert = 0
    first_blocks = (0, 0)
    for number in range(gl.program_id(0), _num_tiles(shape), gl.num_programs(0)):
        expert, output, input = _place(number, shape)
        output += NUMBER * HALF
        # numbers of the expert's first row blocks; experts are visited in order
        for passed in range(last_expert, expert):
            first_blocks = _after(offsets, passed, first_blocks, PARTS)
        last_expert = expert
        total = gl.zeros((HALF, INPUTS), dtype=gl.float32, layout=LAYOUT)
        partial = gl.zeros((HALF, INPUTS), dtype=gl.float32, layout=LAYOUT)
        for part in gl.static_range(PARTS):
            start, end = extent(offsets[part], expert)
            block = first_blocks[part]
            # scales are loaded one block ahead
            left = _scales(grad_scales[part], block, output, outputs, down, start < end)
            right = _scales(rows_scales[part], block, input, inputs, across, start < end)
            for row in range(start, end, ROWS):
                stage = step % STAGES
                grad = grad_stages.index(2 * stage + NUMBER)
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                rows = rows_stages.index(stage)
                partial = warpgroup_mma(grad, rows.permute((1, 0)), partial, use_acc=False, is_async=True)
                down_scales = left
                across_scales = gl.convert_layout(right, gl.SliceLayout(0, LAYOUT))
                block += 1
                left = _scales(grad_scales[part], block, output, outputs, down, row + ROWS < end)
                right = _scales(rows_scales[part], block, input, inputs, across, row + ROWS < end)
                partial = warpgroup_mma_wait(0, deps=(partial,))
                mbarrier.arrive(empty.index(stage), count=1)
                total += partial * down_scales[:, None] * across_scales[None, :]
                step += 1
        left_half, right_half = halves(total)
        quarters = halves(left_half) + halves(right_half)
        for quarter in gl.static_range(4):
            result = results.index(2 * NUMBER + quarter % 2)
            tma.store_wait(1)  # until an earlier store has read this buffer
            result.reshape((HALF, QUARTER)).store(quarters[quarter])
            fence_async_shared()
            place = [expert, output, input + quarter * QUARTER]
            if ADD:
                add_block(out, place, result)
            else:
                tma.async_copy_shared_to_global(out, place, result)
    tma.store_wait(0)


@gluon.jit
def _after(offsets, expert, first_blocks, PARTS: gl.constexpr):
    """Numbers of the first row blocks after those of an expert, per part."""
    start, end = extent(offsets[0], expert)
    first = first_blocks[0] + gl.cdiv(end - start, ROWS)
    if PARTS == 1:
        return first, first_blocks[1]
    else:
        start, end = extent(offsets[1], expert)
        return first, first_blocks[1] + gl.cdiv(end - start, ROWS)
