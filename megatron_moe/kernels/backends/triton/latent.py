"""Keys and values of multi-head latent attention from the KV up-projection, in one pass over memory per direction."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two
from megatron_moe.parallel.autograd_function import AutogradFunction

TILE = 2048
"""Maximum elements of a key or value part that a program processes at a time."""


def latent_key_value(kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    key, value = _KeyValue.apply(kv_SBNC, shared_SBR, key_width)
    return key, value


class _KeyValue(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        kv_SBNC, shared_SBR = kv_SBNC.contiguous(), shared_SBR.contiguous()
        length, batch, heads, width = kv_SBNC.shape
        rotary_dim = shared_SBR.shape[-1]
        key = torch.empty(length, batch, heads, key_width + rotary_dim, device=kv_SBNC.device, dtype=kv_SBNC.dtype)
        if key.numel():
            tile = _tile(heads, max(key_width, rotary_dim))
            _join_keys[(length * batch, cdiv(heads, tile))](
                kv_SBNC, shared_SBR, key, heads, width, key_width, rotary_dim,
                HEADS=tile, KEY=power_of_two(key_width), ROTARY=power_of_two(rotary_dim), num_warps=8,
            )  # fmt: skip
        ctx.sizes = (heads, width, key_width, rotary_dim)
        return key, kv_SBNC[..., key_width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, width, key_width, rotary_dim = ctx.sizes
        grad_key, grad_value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        length, batch = grad_key.shape[:2]
        grad_kv = torch.empty(length, batch, heads, width, device=grad_key.device, dtype=grad_key.dtype)
        grad_shared = torch.empty(length, batch, rotary_dim, device=grad_key.device, dtype=grad_key.dtype)
        if grad_kv.numel():
            _part_keys[(length * batch,)](
                grad_key, grad_value, grad_kv, grad_shared, batch, heads, width, key_width, rotary_dim,
                *grad_key.stride()[:3], *grad_value.stride()[:3],
                HEADS=_tile(heads, max(key_width, width - key_width)), KEY=power_of_two(key_width),
                VALUE=power_of_two(width - key_width), ROTARY=power_of_two(rotary_dim), num_warps=2,
            )  # fmt: skip
        return grad_kv, grad_shared, None


def _tile(heads: int, width: int) -> int:
    return min(power_of_two(heads), max(TILE // power_of_two(width), 1))


@triton.jit
def _join_keys(
    kv_ptr, shared_ptr, key_ptr, num_heads, width, key_width, rotary_dim,
    HEADS: tl.constexpr, KEY: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    own, common = tl.arange(0, KEY), tl.arange(0, ROTARY)
    from_ptr = kv_ptr + (token * num_heads + heads[:, None]) * width
    to_ptr = key_ptr + (token * num_heads + heads[:, None]) * (key_width + rotary_dim)
    there, shares = (heads < num_heads)[:, None], (common < rotary_dim)[None, :]
    mask = there & (own < key_width)[None, :]
    # all loads precede all stores, because a load after a store would wait for that store
    keys = tl.load(from_ptr + own[None, :], mask=mask)
    shared = tl.load(shared_ptr + token * rotary_dim + common[None, :], mask=shares)
    tl.store(to_ptr + own[None, :], keys, mask=mask)
    tl.store(to_ptr + key_width + common[None, :], tl.broadcast_to(shared, (HEADS, ROTARY)), mask=there & shares)


@triton.jit
def _part_keys(
    grad_key_ptr, grad_value_ptr, grad_kv_ptr, grad_shared_ptr, batch, num_heads, width, key_width, rotary_dim,
    key_s, key_b, key_n, value_s, value_b, value_n,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    own, value, common = tl.arange(0, KEY), tl.arange(0, VALUE), tl.arange(0, ROTARY)
    shared = tl.zeros((ROTARY,), dtype=tl.float32)
    for first in range(0, num_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        there = (heads < num_heads)[:, None]
        key_from = grad_key_ptr + s * key_s + b * key_b + heads[:, None] * key_n
        value_from = grad_value_ptr + s * value_s + b * value_b + heads[:, None] * value_n
        to_ptr = grad_kv_ptr + (token * num_heads + heads[:, None]) * width
        of_key, of_value = there & (own < key_width)[None, :], there & (value < width - key_width)[None, :]
        grad_shared = tl.load(
            key_from + key_width + common[None, :], mask=there & (common < rotary_dim)[None, :], other=0.0
        )
        grad_key = tl.load(key_from + own[None, :], mask=of_key)
        grad_value = tl.load(value_from + value[None, :], mask=of_value)
        tl.store(to_ptr + own[None, :], grad_key, mask=of_key)
        tl.store(to_ptr + key_width + value[None, :], grad_value, mask=of_value)
        shared += tl.sum(grad_shared.to(tl.float32), axis=0)
    pointers = grad_shared_ptr + token * rotary_dim + common
    tl.store(pointers, shared.to(grad_shared_ptr.dtype.element_ty), mask=common < rotary_dim)
