"""Steps of update rules for whole matrices: momentum, weight update, and matmuls whose result is symmetric.

A symmetric matmul computes the tiles on and below the diagonal and stores each of them twice, which halves the
operations of x x^T.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, dot
from megatron_moe.kernels.backends.triton.optimizer import (
    PLAIN,
    REMAINDER,
    join_remainder,
    mark_nonfinite,
    store_remainder,
    store_weights,
    stored_magnitude_bits,
)
from megatron_moe.kernels.reference import matrices as reference
from megatron_moe.kernels.update_ops import MatrixStep
from megatron_moe.precision.optimizer_state import PackedState

BLOCK = 1024
"""Elements per program of the elementwise kernels."""
TILE = (128, 128, 64, 8, 4)
"""Rows, columns and depth of a tile of a symmetric matmul, warps, and stages of its pipeline."""
_SMALLEST = 256
"""Smaller matrices are multiplied by torch: with few tiles, most are on the diagonal and nothing is saved."""


def momentum_(
    grad: Tensor, momentum: Tensor, beta: float, move: MatrixStep, dtype: torch.dtype, *, nesterov: bool = False
) -> Tensor:
    update = torch.empty_like(grad, dtype=dtype)
    flags = (flag.view(torch.uint8) for flag in (move.apply_update, move.nonfinite))
    _momentum[(cdiv(len(grad), BLOCK),)](
        grad, momentum, update, move.grad_scale, *flags, len(grad), beta, NESTEROV=nesterov, BLOCK=BLOCK
    )
    return update


def apply_direction_(
    master: PackedState, direction: Tensor, factor: float, move: MatrixStep, weights: Tensor | None = None
) -> None:
    assert master.exponents is None, f"whole matrices with master weights in {master.format}"
    as_bits = weights is not None and weights.dtype is torch.bfloat16
    rounded = master.data if weights is None else weights.view(torch.int16) if as_bits else weights
    flags = (flag.view(torch.uint8) for flag in (move.apply_update, move.nonfinite))
    _descend[(cdiv(master.size, BLOCK),)](
        master.data, rounded, direction, *flags, master.size, 1 - move.lr * move.weight_decay, move.lr * factor,
        MASTER=(REMAINDER if master.format == "remainder" else PLAIN).value, ROUNDED=weights is not None,
        AS_BITS=as_bits, BLOCK=BLOCK,
    )  # fmt: skip


def syrk(x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    number, size, depth = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16) or (size < _SMALLEST and not INTERPRETED):
        return reference.syrk(x, base, beta, alpha)
    out = x.new_empty(number, size, size)
    multiply_tiles(x, base, beta, alpha, out, TILE)
    return out


def multiply_tiles(
    x: Tensor, base: Tensor | None, beta: float, alpha: float, out: Tensor, tile: tuple[int, int, int, int, int]
) -> None:
    """Launches the kernel of `syrk` with a given `TILE`."""
    number, size, depth = x.shape
    rows, columns, step, num_warps, num_stages = tile
    given = out if base is None else base
    assert base is None or base.is_contiguous(), "base is not contiguous"
    grid = (cdiv(size, rows) * cdiv(size, columns), number)
    _symmetric[grid](
        x, given, out, size, depth, *x.stride(), beta, alpha, HAS_BASE=base is not None,
        WHOLE=size % max(rows, columns) == 0 and depth % step == 0, WIDEN=INTERPRETED, ROWS=rows, COLUMNS=columns,
        STEP=step, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


@triton.jit
def _momentum(
    grad_ptr, momentum_ptr, update_ptr, scale_ptr, proceed_ptr, nonfinite_ptr, num, beta, NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = each < num
    grad = tl.load(grad_ptr + each, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    momentum = tl.load(momentum_ptr + each, mask=mask, other=0.0).to(tl.float32)
    momentum = grad + beta * (momentum - grad)
    update = grad + beta * (momentum - grad) if NESTEROV else momentum
    tl.store(update_ptr + each, update.to(update_ptr.dtype.element_ty), mask=mask)
    if tl.load(proceed_ptr) != 0:
        tl.store(momentum_ptr + each, momentum.to(momentum_ptr.dtype.element_ty), mask=mask)
        mark_nonfinite(stored_magnitude_bits(momentum, momentum_ptr, PLAIN), mask, nonfinite_ptr)


@triton.jit
def _descend(
    master_ptr, weights_ptr, direction_ptr, proceed_ptr, nonfinite_ptr, num, keep, step, MASTER: tl.constexpr,
    ROUNDED: tl.constexpr, AS_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(proceed_ptr) != 0:
        each = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = each < num
        if MASTER == REMAINDER:
            master = join_remainder(master_ptr, weights_ptr, each, mask)
        else:
            master = tl.load(master_ptr + each, mask=mask, other=0.0).to(tl.float32)
        direction = tl.load(direction_ptr + each, mask=mask, other=0.0).to(tl.float32)
        master = master * keep - step * direction
        largest = stored_magnitude_bits(master, direction_ptr, REMAINDER)
        if ROUNDED:
            largest = tl.maximum(largest, store_weights(master, weights_ptr, each, mask, AS_BITS))
        if MASTER == REMAINDER:
            store_remainder(master, master_ptr, each, mask)
        else:
            tl.store(master_ptr + each, master.to(master_ptr.dtype.element_ty), mask=mask)
        mark_nonfinite(largest, mask, nonfinite_ptr)


@triton.jit
def _symmetric(
    x_ptr, base_ptr, out_ptr, size, depth, stride_n, stride_m, stride_k, beta, alpha, HAS_BASE: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(size, COLUMNS)
    row, column = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS
    if column < row + ROWS:
        x_ptr += tl.program_id(1).to(tl.int64) * stride_n
        offset = tl.program_id(1).to(tl.int64) * size * size
        rows, columns, ks = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, STEP)
        left = x_ptr + rows[:, None] * stride_m + ks[None, :] * stride_k
        right = x_ptr + columns[None, :] * stride_m + ks[:, None] * stride_k
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, depth, STEP):
            if WHOLE:
                a, b = tl.load(left), tl.load(right)
            else:
                here = ks < depth - k
                a = tl.load(left, mask=(rows < size)[:, None] & here[None, :], other=0.0)
                b = tl.load(right, mask=(columns < size)[None, :] & here[:, None], other=0.0)
            total = dot(a, b, total, WIDEN)
            left += STEP * stride_k
            right += STEP * stride_k
        total *= alpha
        mask = (rows < size)[:, None] & (columns < size)[None, :]
        positions = rows[:, None] * size + columns[None, :]
        if HAS_BASE:
            total += beta * tl.load(base_ptr + offset + positions, mask=mask, other=0.0).to(tl.float32)
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset + positions, out, mask=mask)
        if column != row:
            mirrored = columns[:, None] * size + rows[None, :]
            inside = (columns < size)[:, None] & (rows < size)[None, :]
            tl.store(out_ptr + offset + mirrored, tl.trans(out), mask=inside)
