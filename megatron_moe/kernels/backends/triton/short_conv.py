"""Causal depthwise convolution over a few tokens with SiLU, forward and backward in one pass each.

Backward computes the convolution again instead of saving it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, sum_of_shares

_ROWS, _COLUMNS = 32, 64
"""Tokens and channels of a tile."""
_TOKENS = 512
"""Tokens for which one program sums the weight gradient."""


def short_conv(x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments_BS: Tensor | None) -> Tensor:
    """See `Kernels.short_conv`."""
    out: Tensor = _ShortConv.apply(x_SBC, weight_CK, bias_C, segments_BS)  # type: ignore[no-untyped-call]
    return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
        x = _strided(x)
        segments = None if segments is None else segments.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        length, batch, channels = x.shape
        if x.numel():
            _short_conv_forward[(cdiv(channels, _COLUMNS), cdiv(length, _ROWS), batch)](
                x, weight, bias, segments, out, length, batch, channels, x.stride(1),
                WIDTH=weight.shape[1], ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, segments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, segments = ctx.saved_tensors
        grad = _strided(grads[0])
        (length, batch, channels), width = x.shape, weight.shape[1]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        # each program writes the sums over its tokens of the gradients of weight and bias
        shares = torch.zeros(batch * cdiv(length, _TOKENS), width + 1, channels, device=x.device, dtype=torch.float32)
        if x.numel():
            _short_conv_backward[(cdiv(channels, _COLUMNS), cdiv(length, _TOKENS), batch)](
                grad, x, weight, bias, segments, grad_x, shares, length, batch, channels, grad.stride(1), x.stride(1),
                WIDTH=width, TAPS=power_of_two(width + 1), ROWS=_ROWS, COLUMNS=_COLUMNS, TOKENS=_TOKENS, num_warps=4,
            )  # fmt: skip
        sums = sum_of_shares(shares.flatten(1), torch.float32).view(width + 1, channels)
        grad_bias = None if bias is None else sums[width].to(bias.dtype)
        return grad_x, sums[:width].T.to(weight.dtype).contiguous(), grad_bias, None


def _strided(x: Tensor) -> Tensor:
    """x [S, B, C] with stride 1 along C and evenly spaced rows; copies only if necessary."""
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


@triton.jit
def _convolved(
    x_ptr, weight_ptr, bias_ptr, segments_ptr, tokens, columns, row, length, batch, channels, stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Convolution at the given tokens, fp32 [tokens, columns], before SiLU."""
    mask = columns < channels
    exists = (tokens >= 0) & (tokens < length)
    out = tl.zeros((tokens.shape[0], columns.shape[0]), tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        seen = _seen(segments_ptr, tokens, tokens - back, exists, row, length)
        x = _tile(x_ptr, tokens - back, columns, seen, mask, row, batch, stride)
        weight = tl.load(weight_ptr + columns * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0).to(tl.float32)
        out += weight[None, :] * x
    return out


@triton.jit
def _seen(segments_ptr, tokens, earlier, exists, row, length):
    """Mask of the tokens that exist and whose `earlier` token exists in the same document."""
    seen = exists & (earlier >= 0)
    if segments_ptr is not None:
        ids = tl.load(segments_ptr + row * length + tokens, mask=seen, other=0)
        seen = seen & (ids == tl.load(segments_ptr + row * length + earlier, mask=seen, other=0))
    return seen


@triton.jit
def _tile(ptr, tokens, columns, seen, mask, row, batch, stride):
    """Loads a tile [tokens, columns] in fp32; 0 where the masks are False."""
    rows = (tokens.to(tl.int64) * batch + row) * stride
    return tl.load(ptr + rows[:, None] + columns[None, :], mask=seen[:, None] & mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def _short_conv_forward(
    x_ptr, weight_ptr, bias_ptr, segments_ptr, out_ptr, length, batch, channels, stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tokens, row = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2)
    sums = _convolved(
        x_ptr, weight_ptr, bias_ptr, segments_ptr, tokens, columns, row, length, batch, channels, stride, WIDTH
    )
    rows = (tokens.to(tl.int64) * batch + row) * channels
    out = (sums * tl.sigmoid(sums)).to(out_ptr.dtype.element_ty)
    mask = (tokens < length)[:, None] & (columns < channels)[None, :]
    tl.store(out_ptr + rows[:, None] + columns[None, :], out, mask=mask)


@triton.jit
def _short_conv_backward(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, segments_ptr, grad_x_ptr, shares_ptr, length, batch, channels,
    grad_stride, stride, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradient of x for `TOKENS` tokens, and their sums for the gradients of weight (rows 0 .. WIDTH - 1) and bias."""
    columns, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    held, taps = columns < channels, tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, COLUMNS), tl.float32)
    for start in range(tl.program_id(1) * TOKENS, tl.minimum((tl.program_id(1) + 1) * TOKENS, length), ROWS):
        tokens = start + tl.arange(0, ROWS)
        exists = tokens < length
        grad_x = tl.zeros((ROWS, COLUMNS), tl.float32)
        for ahead in tl.static_range(WIDTH):
            later = tokens + ahead
            seen = _seen(segments_ptr, later, tokens, exists & (later < length), row, length)
            inner = _convolved(
                x_ptr, weight_ptr, bias_ptr, segments_ptr, later, columns, row, length, batch, channels, stride, WIDTH
            )
            gate = tl.sigmoid(inner)
            grad = _tile(grad_ptr, later, columns, seen, held, row, batch, grad_stride)
            grad *= gate * (1.0 + inner * (1.0 - gate))
            weight = tl.load(weight_ptr + columns * WIDTH + WIDTH - 1 - ahead, mask=held, other=0.0).to(tl.float32)
            grad_x += weight[None, :] * grad
            if ahead == 0:
                sums += tl.where((taps == WIDTH)[:, None], tl.sum(grad, axis=0)[None, :], 0.0)
            # token t reads x of token t - ahead: the same pairs of tokens as above
            x = _tile(x_ptr, tokens, columns, seen, held, row, batch, stride)
            of_tap = tl.sum(grad * x, axis=0)
            sums += tl.where((taps == WIDTH - 1 - ahead)[:, None], of_tap[None, :], 0.0)
        rows = (tokens.to(tl.int64) * batch + row) * channels
        mask = exists[:, None] & held[None, :]
        tl.store(grad_x_ptr + rows[:, None] + columns[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    offsets = (row * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1) + taps
    tl.store(
        shares_ptr + offsets[:, None] * channels + columns[None, :], sums, mask=(taps <= WIDTH)[:, None] & held[None, :]
    )
