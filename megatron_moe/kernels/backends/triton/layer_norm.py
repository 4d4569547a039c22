"""LayerNorm (Ba, Kiros and Hinton, arXiv 1607.06450), with one pass over the inputs each for forward and backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import rows_of, weight_grad
from megatron_moe.kernels.backends.triton.norm import backward_tiles, forward_tiles
from megatron_moe.parallel.autograd_function import AutogradFunction


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered)


class _LayerNorm(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        x_RH = rows_of(x)
        num_rows, width = x_RH.shape
        out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        # mean and inverse standard deviation of each row
        moments_2R = torch.empty(2, num_rows, device=x.device, dtype=torch.float32)
        if num_rows:
            grid, tile = forward_tiles(num_rows, width)
            _layer_norm_forward[grid](
                x_RH, weight, bias, out_RH, moments_2R, num_rows, width, x_RH.stride(0), eps,
                ZERO_CENTERED=zero_centered, **tile,
            )  # fmt: skip
        ctx.save_for_backward(x_RH, moments_2R)
        ctx.weight, ctx.bias, ctx.zero_centered = weight, bias, zero_centered
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_RH, moments_2R), weight = ctx.saved_tensors, ctx.weight
        grad_RH, (num_rows, width) = rows_of(grads[0]), x_RH.shape
        grid, tile = backward_tiles(num_rows, width, x_RH.device)
        grad_x_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        # each program writes partial gradients of weight and bias for its rows; these are added in a fixed order
        shares_PW = torch.empty(*grid, 2 * width, device=x_RH.device, dtype=torch.float32)
        _layer_norm_backward[grid](
            grad_RH, x_RH, weight, moments_2R, grad_x_RH, shares_PW, num_rows, width,
            grad_RH.stride(0), x_RH.stride(0),
            ZERO_CENTERED=ctx.zero_centered, **tile,
        )  # fmt: skip
        grads_of = weight_grad(shares_PW[:, :width], weight), weight_grad(shares_PW[:, width:], ctx.bias)
        return grad_x_RH.view(grads[0].shape), *grads_of, None, None


@triton.jit
def _layer_norm_forward(
    x_ptr, weight_ptr, bias_ptr, out_ptr, moments_ptr, num_rows, width, x_stride, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    held_rows, held_columns = rows < num_rows, columns < width
    mask = held_rows[:, None] & held_columns[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=held_columns, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=held_columns, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    mean = tl.sum(x, axis=1) / width
    # padding columns must not contribute to the variance
    centred = tl.where(held_columns[None, :], x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / width + eps)
    out = centred * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(moments_ptr + rows, mean, mask=held_rows)
    tl.store(moments_ptr + num_rows + rows, scale, mask=held_rows)


@triton.jit
def _layer_norm_backward(
    grad_ptr, x_ptr, weight_ptr, moments_ptr, grad_x_ptr, shares_ptr, num_rows, width, grad_stride, x_stride,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    held_columns = columns < width
    weight = tl.load(weight_ptr + columns, mask=held_columns, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    # summed over the rows of the tile only at the end, because the sum needs barriers
    weight_share, bias_share = tl.zeros((ROWS, WIDTH), dtype=tl.float32), tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    # software pipelining: loads of the next rows overlap with this tile
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        held_rows = rows < num_rows
        mask = held_rows[:, None] & held_columns[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(moments_ptr + rows, mask=held_rows, other=0.0)
        scale = tl.load(moments_ptr + num_rows + rows, mask=held_rows, other=0.0)
        # `normed` is not zero in padding columns, but the gradient there is
        normed = (x - mean[:, None]) * scale[:, None]
        weight_share += grad * normed
        bias_share += grad
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * normed, axis=1) / width
        level = tl.sum(weighted, axis=1) / width
        grad_x = (weighted - level[:, None] - normed * along[:, None]) * scale[:, None]
        pointers = grad_x_ptr + rows[:, None] * width + columns[None, :]
        tl.store(pointers, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    pointers = shares_ptr + tl.program_id(0) * 2 * width + columns
    tl.store(pointers, tl.sum(weight_share, axis=0), mask=held_columns)
    tl.store(pointers + width, tl.sum(bias_share, axis=0), mask=held_columns)
