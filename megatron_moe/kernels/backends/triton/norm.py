"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), optionally fused with a residual add and with a cast of the result to
FP8; each pass reads inputs once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.backends.triton.launch import cdiv, num_sms, power_of_two, rows_of, weight_grad
from megatron_moe.kernels.backends.triton.quantize import (
    BLOCK,
    E4M3,
    empty_rows,
    quantize_constants,
    quantize_rows,
    store_tile,
)
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor

TILE = 8192
"""Maximum elements of a tile."""
BACKWARD_PROGRAMS = 2
"""Backward programs per SM."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _RMSNorm.apply(x, weight, eps, zero_centered)


def add_rms_norm(
    residual: Tensor | None, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total, normed = _AddRMSNorm.apply(residual, x, weight, eps, zero_centered, None)
    return total, normed


def rms_norm_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, fmt: OperandFormat = E4M3
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    """See `Kernels.rms_norm_quantized`, for blocks of 1x128."""
    width, cast = x.shape[-1], None
    if power_of_two(width) >= BLOCK:  # narrower rows do not contain a whole block
        cast = empty_rows(x.numel() // width, width, x.device, fmt), fmt
    total, normed = _AddRMSNorm.apply(residual, x, weight, eps, zero_centered, cast)
    if cast is None:
        return total, normed, quantize_rows(normed.detach(), fmt)
    return total, normed, QuantizedTensor(cast[0], None, fmt.block, x.dtype)


_Cast = tuple[QuantizedCopy, OperandFormat]
"""Quantised rowwise copy of a norm's result, which the kernel also writes, and its format."""


class _RMSNorm(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        x_RH = rows_of(x)
        _, out_RH, scale_R = _norm(x_RH, None, weight, eps, zero_centered, None)
        ctx.save_for_backward(x_RH, scale_R)
        ctx.weight, ctx.zero_centered = weight, zero_centered
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, scale_R = ctx.saved_tensors
        grad_x_RH, grad_weight = _norm_backward(grads[0], None, x_RH, ctx.weight, scale_R, ctx.zero_centered)
        return grad_x_RH.view(grads[0].shape), grad_weight, None, None


class _AddRMSNorm(AutogradFunction):
    """Fused residual add and RMSNorm. The backward kernel also adds the gradient of the first output, residual + x. If
    `residual` is None, it first rounds the norm's gradient, as autograd would."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        cast: _Cast | None,
    ) -> tuple[Tensor, Tensor]:
        added_RH = None if residual is None else rows_of(residual)
        total_RH, out_RH, scale_R = _norm(rows_of(x), added_RH, weight, eps, zero_centered, cast)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(total_RH, scale_R)
        ctx.weight, ctx.zero_centered = weight, zero_centered
        ctx.set_materialize_grads(False)
        return x.view_as(x) if residual is None else total_RH.view(x.shape), out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_out = grads
        if grad_out is None:  # the normed output is not used
            return grad_total if ctx.has_residual else None, grad_total, None, None, None, None
        total_RH, scale_R = ctx.saved_tensors
        options = ctx.weight, scale_R, ctx.zero_centered, not ctx.has_residual
        grad_RH, grad_weight = _norm_backward(grad_out, grad_total, total_RH, *options)
        grad = grad_RH.view(grad_out.shape)
        return grad if ctx.has_residual else None, grad, grad_weight, None, None, None


def _norm(
    x_RH: Tensor, residual_RH: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, cast: _Cast | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (sum, which is x without a residual; RMSNorm of the sum; 1 / RMS of each row, fp32 [R]). `cast`: receives
    a copy of the norm in FP8."""
    num_rows, width = x_RH.shape
    total_RH = x_RH if residual_RH is None else torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    scale_R = torch.empty(num_rows, device=x_RH.device, dtype=torch.float32)
    if num_rows:
        added = x_RH if residual_RH is None else residual_RH
        grid, tile = forward_tiles(num_rows, width)
        copy, fmt = cast or (None, E4M3)
        _rms_norm_forward[grid](
            x_RH, added, total_RH, weight, out_RH, scale_R, num_rows, width, x_RH.stride(0), added.stride(0), eps,
            copy and copy.data, copy and copy.scales,
            ADDED=residual_RH is not None, ZERO_CENTERED=zero_centered, **quantize_constants(fmt, x_RH.dtype), **tile,
        )  # fmt: skip
    return total_RH, out_RH, scale_R


def _norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x_RH: Tensor,
    weight: Tensor,
    scale_R: Tensor,
    zero_centered: bool,
    rounds_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns (gradient of x, to which `grad_total` is added if not None; gradient of the weight, or None if it was
    accumulated)."""
    grad_RH = rows_of(grad)
    added_RH = grad_RH if grad_total is None else rows_of(grad_total)
    num_rows, width = x_RH.shape
    grid, tile = backward_tiles(num_rows, width, x_RH.device)
    grad_x_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    # each program writes a partial weight gradient for its rows; these are added in a fixed order
    shares_PH = torch.empty(*grid, width, device=x_RH.device, dtype=torch.float32)
    _rms_norm_backward[grid](
        grad_RH, added_RH, x_RH, weight, scale_R, grad_x_RH, shares_PH, num_rows, width,
        grad_RH.stride(0), added_RH.stride(0), x_RH.stride(0),
        ADDED=grad_total is not None, ROUNDED=rounds_first, ZERO_CENTERED=zero_centered, **tile,
    )  # fmt: skip
    return grad_x_RH, weight_grad(shares_PH, weight)


def forward_tiles(num_rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns (grid, tile sizes and number of warps) of a norm's forward kernel."""
    columns = power_of_two(width)
    rows = max(TILE // 2 // columns, 1)
    return (cdiv(num_rows, rows),), {"ROWS": rows, "WIDTH": columns, "num_warps": 4 if columns <= TILE else 16}


def backward_tiles(num_rows: int, width: int, device: torch.device) -> tuple[tuple[int], dict[str, int]]:
    """Returns (grid, tile sizes and launch options) of a norm's backward kernel. A program processes several tiles."""
    columns = power_of_two(width)
    rows = max(TILE // 2 // columns, 1)
    num_programs = max(min(cdiv(num_rows, rows), BACKWARD_PROGRAMS * num_sms(device)), 1)
    stages, warps = 3 if columns <= TILE // 2 else 1, 8 if columns <= TILE else 16
    return (num_programs,), {"ROWS": rows, "WIDTH": columns, "STAGES": stages, "num_warps": warps}


@triton.jit
def _rms_norm_forward(
    x_ptr, added_ptr, total_ptr, weight_ptr, out_ptr, scale_ptr, num_rows, width, x_stride, added_stride, eps,
    copy_ptr, copy_scales_ptr, ADDED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added_ptr + rows[:, None] * added_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows[:, None] * width + columns[None, :], total, mask=mask)
        x = total.to(tl.float32)  # the norm is that of the rounded sum
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    out = (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out, mask=mask)
    if copy_ptr is not None:
        # with more elements per thread than for `out`, the sum of squares would be added in another order than without
        # a copy
        store_tile(
            out, rows, 0, copy_ptr, copy_scales_ptr, num_rows, width, num_rows, width, LARGEST, BOUND, POWER_OF_TWO,
            VECTOR=128 // out_ptr.dtype.element_ty.primitive_bitwidth,
        )  # fmt: skip
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)


@triton.jit
def _rms_norm_backward(
    grad_ptr, added_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, shares_ptr, num_rows, width,
    grad_stride, added_stride, x_stride,
    ADDED: tl.constexpr, ROUNDED: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    # summed over the rows only at the end, because the sum needs barriers
    share = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    # software pipelining: loads of the next rows overlap with this tile
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if ADDED:
            added = added_ptr + rows[:, None] * added_stride + columns[None, :]
            added = tl.load(added, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = x * scale[:, None]
        share += grad * normed
        weighted = grad * weight[None, :]
        mean = tl.sum(weighted * normed, axis=1) / width
        grad_x = (weighted - normed * mean[:, None]) * scale[:, None]
        if ADDED:
            if ROUNDED:
                grad_x = grad_x.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
            grad_x += added
        pointers = grad_x_ptr + rows[:, None] * width + columns[None, :]
        tl.store(pointers, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    tl.store(shares_ptr + tl.program_id(0) * width + columns, tl.sum(share, axis=0), mask=columns < width)
