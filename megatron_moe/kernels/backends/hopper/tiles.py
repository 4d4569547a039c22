"""Tile loads, barriers and MMA of the Hopper grouped GEMMs.

Kernels are persistent: one program per SM processes many tiles. One warp loads the next tiles of both
operands with the tensor memory accelerator (TMA) as soon as a stage of shared memory is free. Two warpgroups compute
half a tile each. Every stage has two barriers: `full` completes when both operands have arrived, `empty` when both
warpgroups have read them. Loads for the next tile can therefore overlap with the last MMA and store of a tile.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from types import MappingProxyType

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_moe.config.exit_codes import EnvironmentProblem

NAME = "hopper"
_ALIGNMENT = 16
"""Alignment in bytes that TMA requires of tensors and of their rows."""
ROWS_OF_TILE = gl.constexpr(128)
"""Rows of a tile of a grouped GEMM's result."""
_BAND = gl.constexpr(16)
"""Row tiles per band, see `tile_origin`."""
_FAR = gl.constexpr(1 << 30)
"""Index that exceeds the number of rows of any tensor; see `rows_by_slice`."""


class _SharedLayout(gl.NVMMASharedLayout):
    """Layout that formats its text once, because the text is part of the specialisation of every launch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        text = repr(gl.NVMMASharedLayout(**{field.name: getattr(self, field.name) for field in fields(self)}))
        object.__setattr__(self, "_text", text)

    def __repr__(self) -> str:
        return self._text


_LAYOUTS = MappingProxyType(
    {
        (size, rank): _SharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=rank)
        for size in (1, 2, 4)
        for rank in (2, 3, 4)
    }
)
"""Shared-memory layouts by element size in bytes and number of dims. The 128-byte swizzle avoids bank conflicts. Built
once, because building one takes as long on the host as a launch."""
_LAYOUT_OF_SCALES = _SharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def blocks_of(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA descriptor for blocks of a tensor. Out-of-bounds elements are read as zero and not written."""
    return _described(tensor, tensor.shape, tensor.stride(), block, _layout(tensor.element_size(), block))


def scales_of(scales: Tensor, width: int) -> TensorDescriptor:
    """TMA descriptor for the scales, fp32 [blocks, channels], of `width` channels in one block."""
    scales = aligned(scales, "scales")
    return _described(scales, scales.shape, scales.stride(), [1, width], _LAYOUT_OF_SCALES)


def rows_by_slice(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA descriptor for row slices of a matrix [R, C]: rows beyond the slice are read as zero and not written.

    TMA checks the bounds of tensors, not of slices. The matrix is therefore described as a 4-d tensor with strides
    (2^34 - s, s, s, 1), where s is the row stride. For a slice whose last row is end - 1, element (r, d) has the index
    (2^30, end, 2^30 - end + r, d). Its offset is r s + d + 2^64; addresses wrap, so 2^64 has no effect. The size of the
    third dimension is 2^30. TMA therefore treats rows r >= end, whose third index is at least 2^30, as out of bounds.
    """
    step = matrix.stride(0)
    shape, strides = [0x7FFF0000, 0x7FFF0000, _FAR.value, matrix.shape[1]], [2**34 - step, step, step, 1]
    block = [1, 1, *block]
    return _described(matrix, shape, strides, block, _layout(matrix.element_size(), block))


def _described(
    tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int], layout: _SharedLayout
) -> TensorDescriptor:
    """Creates a descriptor without the checks of its constructor, which take longer on the host than a launch.
    `aligned` checks what depends on the tensor."""
    descriptor: TensorDescriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(base=tensor, shape=shape, strides=strides, block_shape=block, layout=layout, padding="zero")
    return descriptor


def aligned(matrix: Tensor, what: str) -> Tensor:
    """Returns `matrix` with the alignment that TMA requires; copies it only if necessary. `what`: name of the operand
    in the error message.

    Raises `EnvironmentProblem` if the row size is not a multiple of 16 bytes.
    """
    size = matrix.element_size()
    *steps, last = matrix.stride()
    fits = last == 1 and math.gcd(matrix.shape[-1], *steps) * size % _ALIGNMENT == 0
    if fits and matrix.data_ptr() % _ALIGNMENT == 0:
        return matrix
    width = matrix.shape[-1] * size
    if width % _ALIGNMENT:
        raise EnvironmentProblem(
            f"Kernel backend '{NAME}' cannot multiply {what} of shape {tuple(matrix.shape)}: a row has {width} bytes, "
            f"but TMA requires a multiple of {_ALIGNMENT}; make the hidden and expert FFN sizes multiples of "
            f"{_ALIGNMENT // size}, or use --kernel-backend reference."
        )
    return matrix.clone(memory_format=torch.contiguous_format)


def _layout(size: int, block: list[int]) -> _SharedLayout:
    """Shared-memory layout of a block with elements of `size` bytes."""
    assert block[-1] * size % 128 == 0, f"rows of {block[-1]} elements of {size} bytes"
    return _LAYOUTS[size, len(block)]


@builtin
def add_block(descriptor, origin, source, _semantic=None):
    """Adds a block of shared memory to global memory asynchronously (TMA reduce, performed in the L2 cache). Uses
    Gluon's IR builder, because Gluon has no function for this operation."""
    origin = _semantic._convert_to_ir_values(origin, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, origin, source.handle)


@gluon.jit
def index_in_slice(row, end, column):
    """Index of an element in a descriptor from `rows_by_slice`, for a slice that ends before row `end`."""
    return [_FAR, end, _FAR - end + row, column]


@gluon.jit
def expert_row_range(offsets_ptr, expert):
    """Returns (first row of an expert, row after its last one)."""
    return gl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0), gl.load(offsets_ptr + expert)


@gluon.jit
def tiles_of(expert, offsets_ptr, columns, TILE_COLUMNS: gl.constexpr):
    """Returns (first row of an expert, end of its rows, number of its row tiles, total number of its tiles)."""
    start, end = expert_row_range(offsets_ptr, expert)
    num_down = gl.cdiv(end - start, ROWS_OF_TILE)
    return start, end, num_down, num_down * gl.cdiv(columns, TILE_COLUMNS)


@gluon.jit
def first_tile_of_program(num_tiles_before):
    """Index of this program's first tile of an expert. Tiles are numbered across all experts and assigned to programs
    round-robin. `num_tiles_before`: number of tiles of all preceding experts."""
    programs = gl.num_programs(0)
    return num_tiles_before + (gl.program_id(0) + programs - num_tiles_before % programs) % programs


@gluon.jit
def tile_origin(tile, start, num_down, columns, TILE_COLUMNS: gl.constexpr):
    """Returns (first row, first column) of an expert's tile number `tile`. Tiles are numbered column by column within
    bands of rows, so that concurrent programs share rows and weights in the L2 cache."""
    per_band = _BAND * gl.cdiv(columns, TILE_COLUMNS)
    first = tile // per_band * _BAND
    height = gl.minimum(num_down - first, _BAND)
    within = tile % per_band
    return start + (first + within % height) * ROWS_OF_TILE, within // height * TILE_COLUMNS


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """Allocates the barriers of all stages. Returns `full` (one arrival: the load) and `empty` (one per warpgroup)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return full, empty


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """fp32 accumulator of one warpgroup, initially 0."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    return gl.zeros((ROWS, COLUMNS), dtype=gl.float32, layout=layout)


@gluon.jit
def accumulate_mma(total, a, b, step, first, full, empty):
    """Waits for the operands of pipeline step `step`, starts total += a @ b, waits for the MMA of the previous step and
    frees its stage. `first`: True for a tile's first step, which frees no stage, because `finish` freed the previous
    one."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    total = warpgroup_mma(a, b, total, is_async=True)
    total = warpgroup_mma_wait(1, deps=(total,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first == False)  # noqa: E712
    return total


@gluon.jit
def finish_mma(total, step, any_steps, full, empty):
    """Waits for a tile's last MMA, frees its stage and returns the sums. `step`: index of the last pipeline step, plus
    1. `any_steps`: False for a tile without steps, which has no stage to free."""
    STAGES: gl.constexpr = full.shape[0]
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=any_steps)
    return total


@gluon.jit
def split_columns(block):
    """Splits a block into the left and the right half of its columns."""
    rows: gl.constexpr = block.shape[0]
    columns: gl.constexpr = block.shape[1]
    return block.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()
