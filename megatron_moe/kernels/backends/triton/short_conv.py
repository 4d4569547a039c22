"""Causal depthwise convolution over at most four tokens with SiLU, forward and backward in one pass each.

Backward computes the convolution again instead of saving it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, sum_of_shares
from megatron_moe.kernels.reference import linear_attention as reference
from megatron_moe.parallel.autograd_function import AutogradFunction

_ROWS, _COLUMNS = 32, 64
"""Tokens and channels of a forward tile."""
_TOKENS, _CHANNELS = 128, 256
"""Tokens and channels of a program of the backward."""
_MAX_WIDTH = 4
"""Largest width whose tokens the backward keeps in registers; wider convolutions run in torch."""


def short_conv(x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments_BS: Tensor | None) -> Tensor:
    if weight_CK.shape[1] > _MAX_WIDTH:
        return reference.short_conv(x_SBC, weight_CK, bias_C, segments_BS)
    return _ShortConv.apply(x_SBC, weight_CK, bias_C, segments_BS)


class _ShortConv(AutogradFunction):
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
        shares = torch.empty(batch * cdiv(length, _TOKENS), width + 1, channels, device=x.device, dtype=torch.float32)
        if x.numel():
            _short_conv_backward[(cdiv(channels, _CHANNELS), cdiv(length, _TOKENS), batch)](
                grad, x, weight, bias, segments, grad_x, shares, length, batch, channels, grad.stride(1), x.stride(1),
                WIDTH=width, COLUMNS=_CHANNELS, TOKENS=_TOKENS, num_warps=2,
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
    """Mask of the tokens that exist and whose predecessor `earlier` is in the same document."""
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
    grad_stride, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of x for `TOKENS` tokens, and these tokens' contributions to the gradients of weight (rows
    0 to WIDTH - 1) and bias.

    Reads one token after the other: a thread keeps the last three inputs of its channels, and the unfinished gradients
    of the last three tokens, in registers.
    """
    columns, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    mask = columns < channels
    first = tl.program_id(1) * TOKENS
    end = tl.minimum(first + TOKENS, length)
    weight_0 = _tap(weight_ptr, columns, mask, 0, WIDTH)
    weight_1 = _tap(weight_ptr, columns, mask, 1, WIDTH)
    weight_2 = _tap(weight_ptr, columns, mask, 2, WIDTH)
    weight_3 = _tap(weight_ptr, columns, mask, 3, WIDTH)
    bias = tl.zeros((COLUMNS,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x_1 = _token(x_ptr, first - 1, columns, mask, length, row, batch, stride)
    x_2 = _token(x_ptr, first - 2, columns, mask, length, row, batch, stride)
    x_3 = _token(x_ptr, first - 3, columns, mask, length, row, batch, stride)
    grad_1 = tl.zeros((COLUMNS,), tl.float32)
    grad_2 = tl.zeros((COLUMNS,), tl.float32)
    grad_3 = tl.zeros((COLUMNS,), tl.float32)
    sum_0 = tl.zeros((COLUMNS,), tl.float32)
    sum_1 = tl.zeros((COLUMNS,), tl.float32)
    sum_2 = tl.zeros((COLUMNS,), tl.float32)
    sum_3 = tl.zeros((COLUMNS,), tl.float32)
    sum_bias = tl.zeros((COLUMNS,), tl.float32)
    for step in tl.range(0, end - first + WIDTH - 1, loop_unroll_factor=4):
        token = first + step
        x = _token(x_ptr, token, columns, mask, length, row, batch, stride)
        near_1 = _same_document(segments_ptr, token, 1, row, length)
        near_2 = _same_document(segments_ptr, token, 2, row, length)
        near_3 = _same_document(segments_ptr, token, 3, row, length)
        inner = bias + weight_0 * x + weight_1 * (near_1 * x_1) + weight_2 * (near_2 * x_2) + weight_3 * (near_3 * x_3)
        gate = tl.sigmoid(inner)
        grad = _token(grad_ptr, token, columns, mask, length, row, batch, grad_stride)
        grad *= gate * (1.0 + inner * (1.0 - gate))
        own = tl.where(token < end, grad, 0.0)  # the next program adds the tokens from `end` on to the sums
        sum_bias += own
        sum_0 += own * x
        sum_1 += own * (near_1 * x_1)
        sum_2 += own * (near_2 * x_2)
        sum_3 += own * (near_3 * x_3)
        grad_0 = weight_0 * grad
        grad_1 += weight_1 * (near_1 * grad)
        grad_2 += weight_2 * (near_2 * grad)
        grad_3 += weight_3 * (near_3 * grad)
        if WIDTH == 1:
            finished = grad_0
        elif WIDTH == 2:
            finished = grad_1
        elif WIDTH == 3:
            finished = grad_2
        else:
            finished = grad_3
        target = token - (WIDTH - 1)
        stored = mask & (target >= first) & (target < end)
        offset = (target.to(tl.int64) * batch + row) * channels
        tl.store(grad_x_ptr + offset + columns, finished.to(grad_x_ptr.dtype.element_ty), mask=stored)
        x_3 = x_2
        x_2 = x_1
        x_1 = x
        grad_3 = grad_2
        grad_2 = grad_1
        grad_1 = grad_0
    shares_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1) * channels + columns
    tl.store(shares_ptr + (WIDTH - 1) * channels, sum_0, mask=mask)
    if WIDTH > 1:
        tl.store(shares_ptr + (WIDTH - 2) * channels, sum_1, mask=mask)
    if WIDTH > 2:
        tl.store(shares_ptr + (WIDTH - 3) * channels, sum_2, mask=mask)
    if WIDTH > 3:
        tl.store(shares_ptr + (WIDTH - 4) * channels, sum_3, mask=mask)
    tl.store(shares_ptr + WIDTH * channels, sum_bias, mask=mask)


@triton.jit
def _tap(weight_ptr, columns, mask, back: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of the input `back` tokens earlier, in fp32; zeros from `WIDTH` on."""
    out = tl.zeros((columns.shape[0],), tl.float32)
    if back < WIDTH:
        out += tl.load(weight_ptr + columns * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0).to(tl.float32)
    return out


@triton.jit
def _token(ptr, token, columns, mask, length, row, batch, stride):
    """Loads the channels of one token in fp32; zeros outside of the sequence."""
    offset = (token.to(tl.int64) * batch + row) * stride
    return tl.load(ptr + offset + columns, mask=mask & (token >= 0) & (token < length), other=0.0).to(tl.float32)


@triton.jit
def _same_document(segments_ptr, token, back: tl.constexpr, row, length):
    """1.0 if the token `back` earlier is in the same document, 0.0 otherwise."""
    same = (token >= back) & (token < length)
    if segments_ptr is not None:
        same = same & (
            tl.load(segments_ptr + row * length + token, mask=same, other=0)
            == tl.load(segments_ptr + row * length + token - back, mask=same, other=0)
        )
    return same.to(tl.float32)
