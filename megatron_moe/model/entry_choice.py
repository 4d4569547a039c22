"""Selects the entries to which each query of compressed attention attends, and computes the loss of the indexer that
selects them.

The score of entry e for query t is I[t, e] = sum_h w[t, h] relu(q[t, h] . k[e]). The loss is KL(p || softmax(I)) over
entries, averaged over queries. p is the sum over heads of the probabilities of attention, whose denominators include
the window and the sinks, divided by its own sum. Neither p nor the choice has a gradient.

Queries are processed in blocks of at most `BLOCK_BYTES` (`config/dsa.py`). The gradients of the loss are computed in
forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.model.sparse_attention import bmm_with_dtype, key_ids_of_mask, row_blocks, select_topk_keys
from megatron_moe.parallel.autograd_function import AutogradFunction


def select_entries(q_UBID: Tensor, k_EBD: Tensor, w_UBI: Tensor, visible_BUE: Tensor, topk: int, relu: bool) -> Tensor:
    """Indices of the `topk` visible entries with the highest scores per query, int32 [U, B, K], in ascending order and
    padded with -1. The lowest index wins ties."""
    found = []
    for rows in _blocks(q_UBID, k_EBD):
        scores_BCE = _scores(q_UBID[rows], k_EBD, w_UBI[rows], relu)
        mask_BCE = select_topk_keys(scores_BCE, visible_BUE[:, rows], topk)
        found.append(key_ids_of_mask(mask_BCE, min(topk, len(k_EBD))))
    return torch.cat(found)


def entry_mask(chosen_UBK: Tensor, number: int) -> Tensor:
    """Converts entry indices to a mask over `number` entries, bool [B, U, E]."""
    mask_UBE = chosen_UBK.new_zeros(*chosen_UBK.shape[:2], number + 1, dtype=torch.bool)
    places = torch.where(chosen_UBK < 0, number, chosen_UBK).long()
    return mask_UBE.scatter_(2, places, True)[..., :number].transpose(0, 1)


@dataclass(frozen=True)
class AttentionTarget:
    """Attention inputs from which the target distribution of the indexer loss is computed."""

    q_UBND: Tensor
    entries_EBD: Tensor
    lse_UBN: Tensor
    """Log-sum-exp of the attention logits, from which the softmax denominators are computed. Excludes the entries if
    `adds_entries`."""
    adds_entries: bool
    """Whether the exponentials of the logits of the allowed entries must be added to the denominators."""
    allowed_BUE: Tensor
    """Entries over which the two distributions are compared, bool."""
    weight_UB: Tensor
    """Weight of every query in the indexer loss."""
    scale: float

    def probabilities(self, rows: slice) -> Tensor:
        """Target distribution over the allowed entries, [B, C, E]; all 0 for queries without an allowed entry."""
        wide, allowed_BC1E = self.lse_UBN.dtype, self.allowed_BUE[:, rows, None]
        q_BCND, lse_BCN1 = (x[rows].transpose(0, 1) for x in (self.q_UBND, self.lse_UBN[..., None]))
        logits = _logits(q_BCND, self.entries_EBD, wide).mul_(self.scale)
        logits.masked_fill_(~allowed_BC1E, -torch.inf)
        if self.adds_entries:
            lse_BCN1 = torch.logaddexp(lse_BCN1, logits.logsumexp(dim=-1, keepdim=True))
        total_BCE = logits.sub_(lse_BCN1).exp_().sum(dim=2)
        return total_BCE / total_BCE.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)


def indexer_loss(q_UBID: Tensor, k_EBD: Tensor, w_UBI: Tensor, target: AttentionTarget, relu: bool) -> Tensor:
    """This rank's term of the indexer loss, a scalar in the internal dtype; the loss is the sum over ranks."""
    return _IndexerLoss.apply(q_UBID, k_EBD, w_UBI, target, relu)


class _IndexerLoss(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, q_UBID: Tensor, k_EBD: Tensor, w_UBI: Tensor, target: AttentionTarget, relu: bool) -> Tensor:
        wide = target.lse_UBN.dtype
        loss, of_k = q_UBID.new_zeros((), dtype=wide), torch.zeros_like(k_EBD, dtype=wide)
        of_q, of_w = torch.empty_like(q_UBID), torch.empty_like(w_UBI)
        for rows in _blocks(q_UBID, k_EBD, target.q_UBND.shape[2]):
            probs_BCE, allowed_BCE = target.probabilities(rows), target.allowed_BUE[:, rows]
            leaves = [x.detach().to(wide).requires_grad_() for x in (q_UBID[rows], k_EBD, w_UBI[rows])]
            with torch.enable_grad():
                scores_BCE = _scores(leaves[0], leaves[1], leaves[2], relu)
                log_BCE = scores_BCE.masked_fill(~allowed_BCE, -torch.inf).log_softmax(dim=-1)
                divergence = torch.special.xlogy(probs_BCE, probs_BCE) - probs_BCE * log_BCE.masked_fill(
                    ~allowed_BCE, 0
                )
                part = (divergence.sum(dim=-1) * target.weight_UB[rows].T).sum()
            loss += part.detach()
            if any(ctx.needs_input_grad[:3]):
                of_q[rows], of_block, of_w[rows] = torch.autograd.grad(part, leaves)
                of_k += of_block
        ctx.save_for_backward(of_q, of_k.to(k_EBD.dtype), of_w)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (*(grad * outer[0].to(grad.dtype) for grad in ctx.saved_tensors), None, None)


def _scores(q_CBID: Tensor, k_EBD: Tensor, w_CBI: Tensor, relu: bool) -> Tensor:
    """Indexer scores of every query and entry, [B, C, E] in the internal dtype."""
    wide = internal_dtype(q_CBID.dtype)
    scores_BCIE = _logits(q_CBID.transpose(0, 1), k_EBD, wide)
    if relu:
        scores_BCIE = scores_BCIE.relu_()
    return (w_CBI.transpose(0, 1)[:, :, None].to(wide) @ scores_BCIE).squeeze(2)


def _logits(q_BCND: Tensor, k_EBD: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits q . k of every query, head and entry, [B, C, N, E] in `dtype`. (`q @ k` with broadcasting would copy k for
    every query.)"""
    return bmm_with_dtype(q_BCND.flatten(1, 2), k_EBD.permute(1, 2, 0), dtype).unflatten(1, q_BCND.shape[1:3])


def _blocks(q_UBID: Tensor, k_EBD: Tensor, heads: int = 0) -> Iterator[slice]:
    """Blocks of queries in which the logits of `heads` heads, or those of the indexer, take `BLOCK_BYTES`."""
    num_queries, batch, own, _ = q_UBID.shape
    return row_blocks(num_queries, batch * max(own, heads) * len(k_EBD) * internal_dtype(q_UBID.dtype).itemsize)
