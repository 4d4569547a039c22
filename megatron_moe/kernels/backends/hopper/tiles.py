"""Tile loads, tile counting and products of the grouped products on Hopper.

Programs are persistent: one per multiprocessor, over many tiles. One warp loads the next tiles of both factors by the
tensor memory accelerator (TMA) as soon as a stage of shared memory is free. Two warpgroups multiply, each half of the
tile. Two barriers per stage synchronise them: `full` when both factors have arrived, `empty` when both warpgroups have
read them. Loads therefore run ahead across tiles and during stores.
"""

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
"""Bytes; TMA finds tensors, and their rows, at multiples of it."""
_FAR = gl.constexpr(1 << 30)
"""More than a tensor has rows; see `rows_by_slice`."""


def blocks_of(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """How TMA reads or writes blocks of a tensor. What lies outside of it is read as zero and not written."""
    return TensorDescriptor.from_tensor(tensor, block, _layout(tensor, block))


def rows_by_slice(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """`blocks_of` for the rows [R, C] of one expert: rows after its last one are read as zero and not written.

    TMA checks the bounds of tensors, not of slices. The matrix is therefore described as one whose element (a, b, c, d)
    is at row a * (2^34 / row - 1) + b + c: with addresses modulo 2^64, (2^30, end, 2^30 - end + r, d) is row r, and its
    third index exceeds the bound of 2^30 from `end` on.
    """
    step = matrix.stride(0)
    shape, strides = [0x7FFF0000, 0x7FFF0000, _FAR.value, matrix.shape[1]], [2**34 - step, step, step, 1]
    return TensorDescriptor(matrix, shape, strides, [1, 1, *block], _layout(matrix, [1, 1, *block]))


def aligned(matrix: Tensor, what: str) -> Tensor:
    """`matrix` with the alignment that TMA needs; a copy only where it is not aligned.

    Raises `EnvironmentProblem` if the rows are not a multiple of 16 bytes.
    """
    width = matrix.shape[-1] * matrix.element_size()
    if width % _ALIGNMENT:
        raise EnvironmentProblem(
            f"Kernel backend '{NAME}' cannot multiply {what} of {tuple(matrix.shape)}: rows of {width} bytes, where "
            f"TMA needs a multiple of {_ALIGNMENT}; make hidden and expert ffn sizes multiples of "
            f"{_ALIGNMENT // matrix.element_size()}, or take --kernel-backend reference."
        )
    steps = (stride * matrix.element_size() for stride in matrix.stride()[:-1])
    fits = matrix.stride(-1) == 1 and matrix.data_ptr() % _ALIGNMENT == 0 and all(s % _ALIGNMENT == 0 for s in steps)
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


def _layout(tensor: Tensor, block: list[int]) -> gl.NVMMASharedLayout:
    """In shared memory: 128 bytes of a row at a time, whose parts of 16 bytes change places so that banks differ."""
    size = tensor.element_size()
    assert block[-1] * size % 128 == 0, f"rows of {block[-1]} elements of {size} bytes"
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=len(block))


@builtin
def add_block(descriptor, place, source, _semantic=None):
    """Adds a block of shared memory to global memory, in the cache there, without waiting for it. The language has the
    operation but no name for it."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, source.handle)


@gluon.jit
def in_slice(row, end, column):
    """Indices for `rows_by_slice` of a row of a slice that ends at `end`."""
    return [_FAR, end, _FAR - end + row, column]


@gluon.jit
def extent(offsets_ptr, expert):
    """First row of an expert, and the one behind its last."""
    return gl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0), gl.load(offsets_ptr + expert)


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """`full`, at which one load arrives, and `empty`, at which both warpgroups do."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return full, empty


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """fp32 sums of one warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    return gl.zeros((ROWS, COLUMNS), dtype=gl.float32, layout=layout)


@gluon.jit
def add_product(total, a, b, step, first, full, empty):
    """Multiplies what stage `step` holds, and frees the stage before, whose product has then been added.

    first: nothing is under way, the stage before was freed by `finish`.
    """
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    total = warpgroup_mma(a, b, total, is_async=True)
    total = warpgroup_mma_wait(1, deps=(total,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first == False)  # noqa: E712
    return total


@gluon.jit
def finish(total, step, any_steps, full, empty):
    """Sums after all products have completed. step: the step after the last."""
    STAGES: gl.constexpr = full.shape[0]
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=any_steps)
    return total


@gluon.jit
def halves(block):
    """Left and right half of the columns."""
    rows: gl.constexpr = block.shape[0]
    columns: gl.constexpr = block.shape[1]
    return block.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()
