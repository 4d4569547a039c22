"""Rotary position embedding (Su et al., arXiv 2104.09864 section 3.4.2).

Backward is the inverse rotation: it uses the forward kernel with negated sines.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two
from megatron_moe.parallel.autograd_function import AutogradFunction

TILE = 4096
"""Maximum elements of x that one program rotates."""


def rope(x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
    return _Rope.apply(x_SBND, cos_SBD, sin_SBD, interleaved, start)


class _Rope(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int) -> Tensor:
        ctx.save_for_backward(cos_SBD, sin_SBD)
        ctx.interleaved, ctx.start = interleaved, start
        return _rotate(x_SBND, cos_SBD, sin_SBD, interleaved, start, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_SBD, sin_SBD = ctx.saved_tensors
        grad_SBND = _rotate(grads[0], cos_SBD, sin_SBD, ctx.interleaved, ctx.start, backward=True)
        return grad_SBND, None, None, None, None


def _rotate(
    x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int, *, backward: bool
) -> Tensor:
    if x_SBND.stride(-1) != 1:
        x_SBND = x_SBND.contiguous()
    cos_SBD, sin_SBD = cos_SBD.contiguous(), sin_SBD.contiguous()
    length, batch, heads, width = x_SBND.shape
    out_SBND = torch.empty(x_SBND.shape, device=x_SBND.device, dtype=x_SBND.dtype)
    rotary_dim = cos_SBD.shape[-1]
    pairs, rest = power_of_two(rotary_dim // 2), power_of_two(width - rotary_dim)
    tile_heads = min(power_of_two(heads), max(TILE // power_of_two(2 * pairs + rest), 1))
    if out_SBND.numel():
        _rotate_heads[(length * batch, cdiv(heads, tile_heads))](
            x_SBND, cos_SBD, sin_SBD, out_SBND, batch, heads, width, rotary_dim, start,
            *x_SBND.stride()[:3], cos_SBD.stride(0), 0 if cos_SBD.shape[1] == 1 else cos_SBD.stride(1),
            INTERLEAVED=interleaved, BACKWARD=backward, HAS_REST=rotary_dim < width,
            HEADS=tile_heads, PAIRS=pairs, REST=rest, num_warps=8 if tile_heads * width > TILE // 2 else 4,
        )  # fmt: skip
    return out_SBND


@triton.jit
def _rotate_heads(
    x_ptr, cos_ptr, sin_ptr, out_ptr, batch, num_heads, width, rotary_dim, begin,
    stride_s, stride_b, stride_n, angle_stride_s, angle_stride_b,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, HAS_REST: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    s, b = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    half = rotary_dim // 2
    angle = s * angle_stride_s + b * angle_stride_b + pairs
    cos = tl.load(cos_ptr + angle, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        sin = -sin
    from_ptr = x_ptr + s * stride_s + b * stride_b + heads[:, None] * stride_n
    to_ptr = out_ptr + (token.to(tl.int64) * num_heads + heads[:, None]) * width
    if HAS_REST:
        # dims before and after the rotated ones; loaded before any store, because a load after a store would wait for
        # it
        rest = tl.arange(0, REST)
        kept = (heads < num_heads)[:, None] & (rest < width - rotary_dim)[None, :]
        rest = tl.where(rest < begin, rest, rest + rotary_dim)
        copied = tl.load(from_ptr + rest[None, :], mask=kept)
    if INTERLEAVED:  # both dims of a pair are adjacent in memory: loaded and stored together, split in registers
        turning = tl.arange(0, 2 * PAIRS)
        mask = (heads < num_heads)[:, None] & (turning < rotary_dim)[None, :]
        x = tl.load(from_ptr + begin + turning[None, :], mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
        y = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), (HEADS, 2 * PAIRS))
        tl.store(to_ptr + begin + turning[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        first, second = begin + pairs, begin + pairs + half
        mask = (heads < num_heads)[:, None] & (pairs < half)[None, :]
        x1 = tl.load(from_ptr + first[None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(from_ptr + second[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(to_ptr + first[None, :], (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(to_ptr + second[None, :], (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_REST:
        tl.store(to_ptr + rest[None, :], copied, mask=kept)
