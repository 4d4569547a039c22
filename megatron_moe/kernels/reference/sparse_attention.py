"""Reference implementation of sparse attention to selected rows of one key-value head, in blocks of queries."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction

BLOCK_BYTES = 1 << 28
"""Maximum bytes of the rows gathered for one block of queries; a block has at least one query."""


def sparse_attention(
    q_UBND: Tensor, kv_SBD: Tensor, ids_UBK: Tensor, sinks_N: Tensor | None, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    return _AttentionInBlocks.apply(q_UBND, kv_SBD, ids_UBK, sinks_N, value_width, scale)


class _AttentionInBlocks(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, ids: Tensor, sinks: Tensor | None, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide = internal_dtype(q.dtype)
        out, lse = q.new_empty(*q.shape[:3], value_width), q.new_empty(q.shape[:3], dtype=wide)
        for part, rows, found in _gathered(kv.to(wide), ids):
            logits = _logits(q[part].to(wide), rows, found, scale)
            lse[part] = logits.logsumexp(dim=-1)
            if sinks is not None:
                lse[part] = torch.logaddexp(lse[part], sinks.to(wide))
            out[part] = (_probs(logits, lse[part]) @ rows[..., :value_width]).to(q.dtype)
        ctx.save_for_backward(q, kv, ids, sinks, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, ids, sinks, out, lse = ctx.saved_tensors
        wide, width = lse.dtype, out.shape[-1]
        of_q, of_kv = torch.empty_like(q), torch.zeros_like(kv, dtype=wide)
        delta, batch = torch.empty_like(lse), torch.arange(kv.shape[1], device=kv.device)[:, None]
        for part, rows, found in _gathered(kv.to(wide), ids):
            q_part, grad = q[part].to(wide), grads[0][part].to(wide)
            probs = _probs(_logits(q_part, rows, found, ctx.scale), lse[part])
            delta[part] = (grad * out[part].to(wide)).sum(dim=-1)
            of_logits = probs * (grad @ rows[..., :width].mT - delta[part][..., None]) * ctx.scale
            of_q[part] = (of_logits @ rows).to(q.dtype)
            of_rows = of_logits.mT @ q_part
            of_rows[..., :width] += probs.mT @ grad
            flat = ids[part].clamp(min=0).long() * kv.shape[1] + batch
            of_kv.view(-1, kv.shape[-1]).index_add_(0, flat.flatten(), of_rows.flatten(0, 2))
        of_sinks = None if sinks is None else sink_grads(sinks, lse, delta)
        return of_q, of_kv.to(kv.dtype), None, of_sinks, None, None


def sink_grads(sinks_N: Tensor, lse_UBN: Tensor, delta_UBN: Tensor) -> Tensor:
    """Gradient of the sink logits: the sum of -(softmax weight of the sink) * delta, as for a key with value 0."""
    shares_UBN = (sinks_N.to(lse_UBN.dtype) - lse_UBN).exp() * delta_UBN
    return -shares_UBN.sum(dim=(0, 1)).to(sinks_N.dtype)


def _gathered(kv_SBD: Tensor, ids_UBK: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (queries, their rows [C, B, K, D], whether each id is one [C, B, K])."""
    batch = torch.arange(kv_SBD.shape[1], device=kv_SBD.device)[None, :, None]
    step = max(BLOCK_BYTES // max(ids_UBK[0].numel() * kv_SBD.shape[-1] * kv_SBD.element_size(), 1), 1)
    for start in range(0, len(ids_UBK), step):
        ids = ids_UBK[start : start + step]
        yield slice(start, start + step), kv_SBD[ids.clamp(min=0).long(), batch], ids >= 0


def _logits(q: Tensor, rows: Tensor, found: Tensor, scale: float) -> Tensor:
    """Attention logits [C, B, N, K]; -inf where an id is -1."""
    return (q @ rows.mT * scale).masked_fill(~found[:, :, None], -torch.inf)


def _probs(logits: Tensor, lse: Tensor) -> Tensor:
    """Attention probabilities; 0 for queries without a row, whose log-sum-exp is -inf."""
    return (logits - lse[..., None]).exp().nan_to_num(nan=0.0)
