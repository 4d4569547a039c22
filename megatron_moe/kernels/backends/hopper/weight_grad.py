"""bf16 expert weight gradients: one launch computes all experts for one or two microbatches. Tensor cores accumulate in
fp32; TMA writes the result to the gradient buffer or adds it."""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from megatron_moe.kernels.backends.hopper.tiles import (
    accumulate_mma,
    add_block,
    aligned,
    blocks_of,
    expert_row_range,
    finish_mma,
    index_in_slice,
    new_barriers,
    rows_by_slice,
    split_columns,
    zeros,
)
from megatron_moe.kernels.backends.triton.launch import num_free_sms
from megatron_moe.kernels.ops import GroupedPart

ROWS = 32
"""Rows per pipeline stage; the last stage of an expert is padded with zeros."""
STAGES = 6
MOST_PARTS = 2
"""Maximum number of parts (microbatches) per launch."""


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`; `out` is fp32."""
    mask = [part for part in parts if len(part.rows)]
    if not mask and not accumulate:
        out.zero_()
    for start in range(0, len(mask), MOST_PARTS):
        _launch(mask[start : start + MOST_PARTS], out, accumulate or start > 0)


def _launch(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    num_experts, outputs, inputs = out.shape
    if out.numel() == 0:
        return
    # 128 x 256 or 256 x 128, whichever needs fewer tiles
    half_outputs, tile_inputs = min(
        ((64, 256), (128, 128)), key=lambda tile: -(-outputs // (2 * tile[0])) * -(-inputs // tile[1])
    )

    def descriptors_of(part: GroupedPart) -> tuple[TensorDescriptor, TensorDescriptor, Tensor]:
        grad = rows_by_slice(aligned(part.grad, "gradients"), [ROWS, half_outputs])
        return grad, rows_by_slice(aligned(part.rows, "rows"), [ROWS, tile_inputs]), part.offsets_e

    assert out.is_contiguous() and aligned(out, "weight gradients") is out, f"{out.shape} {out.stride()}"
    _expert_grads[(num_free_sms(out.device),)](
        *descriptors_of(parts[0]), *descriptors_of(parts[-1]), blocks_of(out, [1, half_outputs, tile_inputs // 4]),
        num_experts, outputs, inputs, PARTS=len(parts), ADD=accumulate, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


@aggregate
class _Tiles:
    """Tiles of the result and the shared-memory stages of the operands, as used by both the loading warp and the MMA
    warpgroups."""

    grads: gl.shared_memory_descriptor
    """Output gradients: two blocks per stage, one per warpgroup."""
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_experts: gl.tensor
    outputs: gl.tensor
    inputs: gl.tensor
    STAGES: gl.constexpr
    STEP: gl.constexpr
    """Expert rows per pipeline stage of the kernel."""
    HALF: gl.constexpr
    """Output channels of a tile that one of the two warpgroups computes."""
    INPUTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, grads, rows, full, empty, num_experts, outputs, inputs):
        self.grads, self.rows, self.full, self.empty = grads, rows, full, empty
        self.num_experts, self.outputs, self.inputs = num_experts, outputs, inputs
        self.STAGES, self.STEP = gl.constexpr(full.shape[0]), gl.constexpr(grads.shape[3])
        self.HALF, self.INPUTS = gl.constexpr(grads.shape[4]), gl.constexpr(rows.shape[4])

    @gluon.jit
    def count(self):
        """Number of tiles of all experts."""
        return self.num_experts * gl.cdiv(self.outputs, 2 * self.HALF) * gl.cdiv(self.inputs, self.INPUTS)

    @gluon.jit
    def origin(self, number):
        """Returns (expert, first output channel, first input channel) of tile `number`."""
        num_down = gl.cdiv(self.outputs, 2 * self.HALF)
        per_expert = num_down * gl.cdiv(self.inputs, self.INPUTS)
        tile = number % per_expert
        return number // per_expert, tile % num_down * (2 * self.HALF), tile // num_down * self.INPUTS


@gluon.jit(do_not_specialize=("num_experts", "outputs", "inputs"))
def _expert_grads(
    grad0, rows0, offsets0_ptr, grad1, rows1, offsets1_ptr, out, num_experts, outputs, inputs,
    PARTS: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weight gradients of all experts, summed over one or two microbatches (`PARTS`)."""
    grads, rows, offsets = (grad0, grad1), (rows0, rows1), (offsets0_ptr, offsets1_ptr)
    grad_stages = gl.allocate_shared_memory(grad0.dtype, [2 * STAGES] + grad0.block_type.shape, grad0.layout)
    rows_stages = gl.allocate_shared_memory(rows0.dtype, [STAGES] + rows0.block_type.shape, rows0.layout)
    # two buffers per warpgroup: while a quarter of the columns is stored, the next one is written
    results = gl.allocate_shared_memory(out.dtype, [4] + out.block_type.shape, out.layout)
    full, empty = new_barriers(STAGES)
    tiles = _Tiles(grad_stages, rows_stages, full, empty, num_experts, outputs, inputs)
    gl.warp_specialize(
        [
            (_sum_tiles, (gl.constexpr(0), out, results, offsets, tiles, PARTS, ADD)),
            (_sum_tiles, (gl.constexpr(1), out, results, offsets, tiles, PARTS, ADD)),
            (_load_tiles, (grads, rows, offsets, tiles, PARTS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_tiles(grads, rows, offsets, tiles, PARTS: gl.constexpr):
    step = 0
    for number in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        expert, output, input = tiles.origin(number)
        for part in gl.static_range(PARTS):
            start, end = expert_row_range(offsets[part], expert)
            for row in range(start, end, tiles.STEP):
                stage = step % tiles.STAGES
                mbarrier.wait(tiles.empty.index(stage), (step // tiles.STAGES & 1) ^ 1)
                bar = tiles.full.index(stage)
                mbarrier.expect(bar, 2 * grads[part].block_type.nbytes + rows[part].block_type.nbytes)
                for half in gl.static_range(2):
                    origin = index_in_slice(row, end, output + half * tiles.HALF)
                    tma.async_copy_global_to_shared(grads[part], origin, bar, tiles.grads.index(2 * stage + half))
                tma.async_copy_global_to_shared(
                    rows[part], index_in_slice(row, end, input), bar, tiles.rows.index(stage)
                )
                step += 1


@gluon.jit
def _num_steps(offsets, expert, STEP: gl.constexpr, PARTS: gl.constexpr):
    steps = 0
    for part in gl.static_range(PARTS):
        start, end = expert_row_range(offsets[part], expert)
        steps += gl.cdiv(end - start, STEP)
    return steps


@gluon.jit
def _sum_tiles(HALF_NUMBER: gl.constexpr, out, results, offsets, tiles, PARTS: gl.constexpr, ADD: gl.constexpr):
    STEP: gl.constexpr = tiles.STEP
    HALF: gl.constexpr = tiles.HALF
    QUARTER: gl.constexpr = tiles.INPUTS // 4
    step = 0
    for number in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        expert, output, input = tiles.origin(number)
        output += HALF_NUMBER * HALF
        total = zeros(HALF, tiles.INPUTS)
        num_steps = _num_steps(offsets, expert, STEP, PARTS)
        for k in range(num_steps):
            stage = step % tiles.STAGES
            grad = tiles.grads.index(2 * stage + HALF_NUMBER).reshape((STEP, HALF)).permute((1, 0))
            rows = tiles.rows.index(stage).reshape((STEP, tiles.INPUTS))
            total = accumulate_mma(total, grad, rows, step, k == 0, tiles.full, tiles.empty)
            step += 1
        total = finish_mma(total, step, num_steps > 0, tiles.full, tiles.empty)
        left, right = split_columns(total)
        quarters = split_columns(left) + split_columns(right)
        for quarter in gl.static_range(4):
            result = results.index(2 * HALF_NUMBER + quarter % 2)
            tma.store_wait(1)  # waits until an earlier store has read this buffer
            result.reshape((HALF, QUARTER)).store(quarters[quarter])
            fence_async_shared()
            origin = [expert, output, input + quarter * QUARTER]
            if ADD:
                add_block(out, origin, result)
            else:
                tma.async_copy_shared_to_global(out, origin, result)
    tma.store_wait(0)
