"""RMSNorm forward and backward (Zhang and Sennrich, arXiv 1910.07467): each reads its inputs once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import num_multiprocessors, power_of_two, rows_of

TILE = 8192
"""Elements that one program holds at a time."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """See `Kernels.rms_norm`."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        x_RH = rows_of(x)
        num_rows, width = x_RH.shape
        out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        scale_R = torch.empty(num_rows, device=x.device, dtype=torch.float32)
        tile_rows, tile_width = _tile(width)
        if num_rows:
            _rms_norm_forward[(triton.cdiv(num_rows, tile_rows),)](
                x_RH, weight, out_RH, scale_R, num_rows, width, x_RH.stride(0), eps,
                ZERO_CENTERED=zero_centered, ROWS=tile_rows, WIDTH=tile_width, num_warps=_warps(tile_width),
            )  # fmt: skip
        ctx.save_for_backward(x_RH, weight, scale_R)
        ctx.zero_centered = zero_centered
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight, scale_R = ctx.saved_tensors
        grad_RH = rows_of(grads[0])
        num_rows, width = x_RH.shape
        tile_rows, tile_width = _tile(width)
        grad_x_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        # every program sums its rows' share of the weight's gradient; the shares are added in a fixed order
        num_programs = max(min(triton.cdiv(num_rows, tile_rows), 4 * num_multiprocessors(x_RH.device)), 1)
        shares_PH = torch.empty(num_programs, width, device=x_RH.device, dtype=torch.float32)
        _rms_norm_backward[(num_programs,)](
            grad_RH, x_RH, weight, scale_R, grad_x_RH, shares_PH, num_rows, width, grad_RH.stride(0), x_RH.stride(0),
            ZERO_CENTERED=ctx.zero_centered, ROWS=tile_rows, WIDTH=tile_width, num_warps=_warps(tile_width),
        )  # fmt: skip
        return grad_x_RH.view(grads[0].shape), shares_PH.sum(dim=0).to(weight.dtype), None, None


def _tile(width: int) -> tuple[int, int]:
    """(rows, width) of a tile."""
    tile_width = power_of_two(width)
    return max(TILE // 2 // tile_width, 1), tile_width


def _warps(tile_width: int) -> int:
    return 4 if tile_width <= TILE else 16


@triton.jit
def _rms_norm_forward(
    x_ptr, weight_ptr, out_ptr, scale_ptr, num_rows, width, x_stride, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    held = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=held, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=held)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)


@triton.jit
def _rms_norm_backward(
    grad_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, shares_ptr, num_rows, width, grad_stride, x_stride,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    share = tl.zeros((WIDTH,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        held = (rows < num_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=held, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=held, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = x * scale[:, None]
        share += tl.sum(grad * normed, axis=0)
        weighted = grad * weight[None, :]
        mean = tl.sum(weighted * normed, axis=1) / width
        grad_x = (weighted - normed * mean[:, None]) * scale[:, None]
        place = grad_x_ptr + rows[:, None] * width + columns[None, :]
        tl.store(place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=held)
    tl.store(shares_ptr + tl.program_id(0) * width + columns, share, mask=columns < width)
