"""Sparse attention of each query to selected rows of one key-value head, gathered inside the kernels."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, power_of_two
from megatron_moe.kernels.backends.triton.sparse_attention.backward import chosen_grads
from megatron_moe.kernels.backends.triton.sparse_attention.forward import attend_to_chosen
from megatron_moe.kernels.reference import sparse_attention as reference
from megatron_moe.parallel.autograd_function import AutogradFunction

WIDEST_VALUE, WIDEST_REST = 512, 64
"""Maximum number of channels of the values, and of the remaining channels of the keys, for which the tiles fit into an
SM."""
HEADS, KEYS = 64, 64
"""Heads and rows per tile."""


def sparse_attention(
    q_UBND: Tensor, kv_SBD: Tensor, ids_UBK: Tensor, sinks_N: Tensor | None, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `Kernels.sparse_attention`. The reference implementation computes wider heads, fp32 on a GPU, and
    deterministic mode (the backward kernel uses atomics)."""
    inputs = q_UBND, kv_SBD, ids_UBK, sinks_N, value_width, scale
    rest = q_UBND.shape[-1] - value_width
    narrow = value_width <= WIDEST_VALUE and rest <= WIDEST_REST
    fast = q_UBND.dtype.itemsize == 2 or INTERPRETED
    near = max(kv_SBD.numel(), kv_SBD.shape[0] * kv_SBD.stride(0)) < 2**31  # offsets of rows are 32-bit
    if torch.are_deterministic_algorithms_enabled() or not (narrow and fast and near and q_UBND.numel()):
        return reference.sparse_attention(*inputs)
    return _GatheredAttention.apply(*inputs)


class _GatheredAttention(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, ids: Tensor, sinks: Tensor | None, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, kv = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, kv))
        ids = ids.contiguous()
        (rows, batch, heads, _), rest = q.shape, q.shape[-1] - value_width
        out = q.new_empty(rows, batch, heads, value_width)
        lse = torch.empty(rows, batch, heads, device=q.device, dtype=torch.float32)
        attend_to_chosen[(rows * batch, cdiv(heads, HEADS))](
            q, kv, ids, q if sinks is None else sinks, out, lse, batch, heads, ids.shape[-1], scale,
            *q.stride()[:3], *kv.stride()[:2],
            SINKS=sinks is not None, WIDEN=INTERPRETED, HEADS=HEADS, KEYS=KEYS, **_widths(value_width, rest, 1),
            num_warps=8, num_stages=3,
        )  # fmt: skip
        ctx.save_for_backward(q, kv, ids, sinks, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, ids, sinks, out, lse = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        (rows, batch, heads, width), value_width = q.shape, out.shape[-1]
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_kv = torch.zeros(kv.shape, device=kv.device, dtype=torch.float32)
        delta = torch.empty_like(lse)
        chosen_grads[(rows * batch, cdiv(heads, HEADS))](
            q, kv, ids, grad, out, lse, delta, grad_q, grad_kv, batch, heads, ids.shape[-1], ctx.scale,
            *q.stride()[:3], *kv.stride()[:2], *grad.stride()[:3],
            WIDEN=INTERPRETED, HEADS=HEADS, KEYS=KEYS, **_widths(value_width, width - value_width, 4),
            num_warps=8, num_stages=1,
        )  # fmt: skip
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = reference.sink_grads(sinks, lse, delta)
        return grad_q, grad_kv.to(kv.dtype), None, grad_sinks, None, None


def _widths(value_width: int, rest: int, num_chunks: int) -> dict[str, int]:
    """Tile widths of the value channels, which are divided into `num_chunks` chunks, and of the remaining key
    channels."""
    name = "VALUE" if num_chunks == 1 else "CHUNK"
    return {
        name: max(power_of_two(value_width) // num_chunks, 16), "REST": max(power_of_two(rest), 16),
        "VALUE_WIDTH": value_width, "REST_WIDTH": rest,
    }  # fmt: skip
