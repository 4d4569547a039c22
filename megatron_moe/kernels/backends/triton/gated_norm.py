"""RMSNorm with a SiLU or sigmoid gate, before or after the norm, in one pass each for forward and backward."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import weight_grad
from megatron_moe.kernels.backends.triton.norm import backward_tiles, forward_tiles
from megatron_moe.parallel.autograd_function import AutogradFunction


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    is_silu = activation == "silu"
    return _GatedRMSNorm.apply(x, gate, weight, eps, norm_first, is_silu)


class _GatedRMSNorm(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, is_silu: bool
    ) -> Tensor:
        x_TC, gate_TC = (each.reshape(-1, each.shape[-2:].numel()) for each in (x, gate))
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        groups, width = x.shape[-2:]
        if x.numel():
            grid, tile = forward_tiles(x.numel() // width, width)
            _gated_norm_forward[grid](
                x_TC, gate_TC, weight, out, x.numel() // width, groups, width, x_TC.stride(0), gate_TC.stride(0), eps,
                NORM_FIRST=norm_first, SILU=is_silu, PER_GROUP=weight.dim() == 2, **tile,
            )  # fmt: skip
        ctx.save_for_backward(x_TC, gate_TC)
        ctx.weight = weight
        ctx.eps, ctx.norm_first, ctx.is_silu, ctx.shape = eps, norm_first, is_silu, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TC, gate_TC), weight = ctx.saved_tensors, ctx.weight
        grad, (groups, width) = grads[0].contiguous(), ctx.shape[-2:]
        grad_x, grad_gate = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x_TC, gate_TC))
        per_group = weight.dim() == 2
        # a tile contains rows of one group only if the weights differ by group
        (num_programs,), tile = backward_tiles(len(x_TC) * (1 if per_group else groups), width, x_TC.device)
        grid = (num_programs, groups if per_group else 1)
        shares_PGW = torch.empty(*grid, width, device=x_TC.device, dtype=torch.float32)
        _gated_norm_backward[grid](
            grad, x_TC, gate_TC, weight, grad_x, grad_gate, shares_PGW, len(x_TC), groups, width,
            x_TC.stride(0), gate_TC.stride(0), ctx.eps, NORM_FIRST=ctx.norm_first, SILU=ctx.is_silu,
            PER_GROUP=per_group, **tile,
        )  # fmt: skip
        grad_weight = weight_grad(shares_PGW.flatten(1), weight)
        return grad_x.view(ctx.shape), grad_gate.view(ctx.shape), grad_weight, None, None, None


@triton.jit
def _gated_norm_forward(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_rows, groups, width, x_stride, gate_stride, eps,
    NORM_FIRST: tl.constexpr, SILU: tl.constexpr, PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows, columns = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, group = rows // groups, rows % groups
    inner = group[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + tokens[:, None] * x_stride + inner, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + tokens[:, None] * gate_stride + inner, mask=mask, other=0.0).to(tl.float32)
    weight = _weights(weight_ptr, inner, columns, width, mask, PER_GROUP)
    factor = tl.sigmoid(gate)
    if SILU:
        factor *= gate
    if not NORM_FIRST:
        x *= factor
    out = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None] * weight
    if NORM_FIRST:
        out *= factor
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weights(weight_ptr, inner, columns, width, mask, PER_GROUP: tl.constexpr):
    """Weights of a tile in fp32, [rows, columns], or [1, columns] if all groups share the same weights."""
    if PER_GROUP:
        return tl.load(weight_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gated_norm_backward(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, grad_x_ptr, grad_gate_ptr, shares_ptr, num_tokens, groups, width,
    x_stride, gate_stride, eps, NORM_FIRST: tl.constexpr, SILU: tl.constexpr, PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    num_rows = num_tokens if PER_GROUP else num_tokens * groups
    total = tl.zeros((WIDTH,), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
        if PER_GROUP:
            tokens, group = rows, tl.zeros((ROWS,), tl.int64) + tl.program_id(1)
        else:
            tokens, group = rows // groups, rows % groups
        inner = group[:, None] * width + columns[None, :]
        out = (tokens * groups + group)[:, None] * width + columns[None, :]
        x = tl.load(x_ptr + tokens[:, None] * x_stride + inner, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + tokens[:, None] * gate_stride + inner, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + out, mask=mask, other=0.0).to(tl.float32)
        weight = _weights(weight_ptr, inner, columns, width, mask, PER_GROUP)
        sigmoid = tl.sigmoid(gate)
        if SILU:
            factor = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        else:
            factor = sigmoid
            slope = sigmoid * (1.0 - sigmoid)
        y = x if NORM_FIRST else x * factor
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)[:, None]
        normed = y * scale
        grad_normed = grad * weight
        if NORM_FIRST:
            grad_gate = grad_normed * normed * slope
            grad_normed *= factor
            total += tl.sum(grad * normed * factor, axis=0)
        else:
            total += tl.sum(grad * normed, axis=0)
        grad_y = scale * (grad_normed - normed * (tl.sum(grad_normed * normed, axis=1) / width)[:, None])
        if not NORM_FIRST:
            grad_gate = grad_y * x * slope
            grad_y *= factor
        tl.store(grad_x_ptr + out, grad_y.to(grad_x_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_gate_ptr + out, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    offsets = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * width
    tl.store(shares_ptr + offsets + columns, total, mask=columns < width)
