"""Selects the keys that each query attends to, and computes the indexer loss.

Queries are processed in blocks whose scores take at most `BLOCK_BYTES`, so that no tensor with a value per head, query
and key is alive. The gradients of the indexer's loss are computed in forward.

The indexer's scores are I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]). Its loss is KL(p || softmax(I)), averaged over
queries, where p is the sum over heads of the probabilities of attention, divided by its own sum (DeepSeek-V3.2, section
2.1). Neither p nor the choice has a gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.dsa import BLOCK_BYTES, IndexerConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_gather_flat, all_reduce_, reduce_scatter_flat
from megatron_moe.parallel.context import ProcessGroup


@dataclass(frozen=True)
class QueryRows:
    """Queries of this rank, and the keys that the causal mask and documents let them see."""

    chunks: tuple[range, ...]
    """Positions of the queries in their sequence."""
    segments_BS: Tensor | None
    """Document ids of all positions of the sequences; None if every sequence is one document."""
    device: torch.device

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @cached_property
    def positions(self) -> list[int]:
        """Position of every query."""
        return [position for chunk in self.chunks for position in chunk]

    @cached_property
    def positions_Q(self) -> Tensor:
        """`positions` on the device."""
        return torch.cat([torch.arange(c.start, c.stop, device=self.device) for c in self.chunks])

    def visible(self, rows: Tensor | slice, num_keys: int) -> Tensor:
        """Whether the queries `rows` see each of the first `num_keys` keys: bool [B or 1, rows, num_keys]."""
        positions_C = self.positions_Q[rows]
        seen = positions_C[:, None] >= torch.arange(num_keys, device=self.device)
        if self.segments_BS is None:
            return seen[None]
        return seen & (self.segments_BS[:, positions_C, None] == self.segments_BS[:, None, :num_keys])


def row_blocks(num_rows: int, bytes_per_row: int) -> Iterator[slice]:
    """Divides `num_rows` rows into ranges that need at most `BLOCK_BYTES` each; a range has at least one row."""
    step = max(BLOCK_BYTES // max(bytes_per_row, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def pack_bits(mask: Tensor, width: int) -> Tensor:
    """Bool [..., n] as one bit per value: uint8 [..., ceil(width / 8)], with n <= width. Missing values are False."""
    padded = torch.nn.functional.pad(mask, (0, -(-width // 8) * 8 - mask.shape[-1])).unflatten(-1, (-1, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded.to(torch.uint8) << shifts).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, num: int) -> Tensor:
    """First `num` values of `pack_bits`, bool [..., num]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., : -(-num // 8), None] >> shifts) & 1).flatten(-2)[..., :num].bool()


def select_topk_keys(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Mask of the `topk` visible keys with the highest scores per query, bool [B, C, K]. The lowest position wins ties,
    so that the selection does not depend on the layout."""
    visible = visible.expand_as(scores)
    if scores.shape[-1] <= topk:
        return visible
    scores = scores.masked_fill(~visible, -torch.inf)
    least = scores.topk(topk, dim=-1).values[..., -1:]
    above, equal = scores > least, (scores == least) & visible
    room = topk - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def key_ids_of_mask(chosen_BCK: Tensor, num: int) -> Tensor:
    """Converts a mask with at most `num` keys per query to key ids, ascending and padded with -1: int32 [C, B, num]."""
    size = chosen_BCK.shape[-1]
    distance = torch.arange(size, 0, -1, device=chosen_BCK.device, dtype=torch.int32)
    best = (chosen_BCK * distance).topk(min(num, size), dim=-1).values
    ids = torch.where(best > 0, size - best, -1).transpose(0, 1)
    return torch.nn.functional.pad(ids, (0, num - ids.shape[-1]), value=-1)


def raise_maxima_(maxima_N: Tensor, q_UBND: Tensor, rows_SBD: Tensor, ids_UBK: Tensor, scale: float) -> None:
    """Raises `maxima_N` to the largest logit of each head over the selected keys."""
    wide, batch = internal_dtype(q_UBND.dtype), torch.arange(q_UBND.shape[1], device=q_UBND.device)[:, None]
    _, _, heads, width = q_UBND.shape
    for part in row_blocks(len(q_UBND), ids_UBK[0].numel() * (width + heads) * wide.itemsize):
        ids = ids_UBK[part].long()
        logits = q_UBND[part].to(wide) @ rows_SBD[ids.clamp(min=0), batch].to(wide).mT * scale
        largest_N = logits.masked_fill_((ids < 0)[:, :, None], -torch.inf).amax(dim=(0, 1, 3))
        maxima_N.copy_(torch.maximum(maxima_N, largest_N))


def bmm_with_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Batched matmul a @ b with accumulation and result in `dtype`, which is at least as wide as that of the
    operands."""
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


@dataclass(frozen=True)
class KeySelection:
    """Arguments of `select_keys` that need no gradients."""

    config: IndexerConfig
    queries: QueryRows
    """All queries of this context-parallel rank."""
    shard: tuple[int, int]
    """(index, number of parts): equal part of these queries that this tensor-parallel rank's indexer scores."""
    heads: ProcessGroup
    """Process group over which the attention heads are divided."""
    softmax_scale: float
    weight_BR: Tensor | None
    """Weight in the indexer loss of every query that this rank scores, 0 for padding; None means no loss."""


class _SelectKeys(AutogradFunction):
    """Autograd function of `select_keys`: selected keys of all queries of this rank, and this rank's term of the
    indexer loss."""

    @staticmethod
    def forward(
        ctx: Any, q_RBID: Tensor, k_SBD: Tensor, w_RBI: Tensor, q_UBND: Tensor, rows_SBD: Tensor, job: KeySelection
    ) -> tuple[Tensor, Tensor]:
        (num_rows, batch, heads, _), seq = q_RBID.shape, len(k_SBD)
        index, parts = job.shard
        wide, positions = internal_dtype(q_RBID.dtype), job.queries.positions
        loss = q_RBID.new_zeros((), dtype=wide)
        has_grads = job.weight_BR is not None and any(ctx.needs_input_grad[:3])
        grads = [torch.zeros_like(x, dtype=wide) for x in (q_RBID, k_SBD, w_RBI)] if has_grads else []
        ids, num_ids = [], min(job.config.topk, seq)
        num_heads = max(heads, parts * q_UBND.shape[2] if job.weight_BR is not None else 0)
        for rows in row_blocks(num_rows, batch * num_heads * seq * wide.itemsize):
            # rows of all parts, because each rank has its attention heads for all of them
            of_parts = [range(part * num_rows + rows.start, part * num_rows + rows.stop) for part in range(parts)]
            num_keys = max(positions[row] for part in of_parts for row in part) + 1
            own = slice(of_parts[index].start, of_parts[index].stop)
            q_BZD = q_RBID[rows].permute(1, 0, 2, 3).flatten(1, 2).to(wide)
            keys_BKD = k_SBD[:num_keys].transpose(0, 1).to(wide)
            shown_BCIK = torch.bmm(q_BZD, keys_BKD.mT).unflatten(1, (-1, heads))
            if job.config.relu:
                shown_BCIK.relu_()
            w_BCI = w_RBI[rows].permute(1, 0, 2).to(wide)
            scores_BCK = (w_BCI[:, :, None] @ shown_BCIK).squeeze(2)
            visible = job.queries.visible(own, num_keys)
            chosen_BCK = select_topk_keys(scores_BCK, visible, job.config.topk)
            ids.append(key_ids_of_mask(chosen_BCK, num_ids))
            if job.weight_BR is None:
                continue
            allowed_BCK = chosen_BCK if job.config.sparse_indexer_loss else visible.expand_as(chosen_BCK)
            target_BCK = _attended(q_UBND, rows_SBD, job, of_parts, allowed_BCK, num_keys)
            log_BCK = scores_BCK.masked_fill(~allowed_BCK, -torch.inf).log_softmax(dim=-1)
            weight_BC1 = job.weight_BR[:, rows, None]
            divergence = torch.special.xlogy(target_BCK, target_BCK) - target_BCK * log_BCK.masked_fill(~allowed_BCK, 0)
            loss += (divergence * weight_BC1).sum()
            if not has_grads:
                continue
            of_scores_BCK = (log_BCK.exp() - target_BCK) * weight_BC1
            grads[2][rows] = (shown_BCIK @ of_scores_BCK[..., None]).squeeze(-1).permute(1, 0, 2)
            of_pairs = of_scores_BCK[:, :, None] * w_BCI[..., None]
            if job.config.relu:
                of_pairs.masked_fill_(shown_BCIK == 0, 0)
            del shown_BCIK
            of_pairs = of_pairs.flatten(1, 2)
            grads[0][rows] = torch.bmm(of_pairs, keys_BKD).unflatten(1, (-1, heads)).transpose(0, 1)
            grads[1][:num_keys] += torch.bmm(of_pairs.mT, q_BZD).transpose(0, 1)
        ids_UBK = torch.cat(ids)
        if parts > 1:
            ids_UBK = _gathered(ids_UBK, job.heads)
        ctx.mark_non_differentiable(ids_UBK)
        ctx.save_for_backward(*(grad.to(q_RBID.dtype) for grad in grads))
        return ids_UBK, loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad * outer[1].to(grad.dtype) for grad in ctx.saved_tensors]
        return (*(grads or (None, None, None)), None, None, None)


def _gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """All-gathers rows (dim 0) over a group."""
    # collective over tp: all-gather of the selections of this rank's queries, which have no gradient
    own = own.contiguous()
    return all_gather_flat(own.new_empty(group.size * len(own), *own.shape[1:]), own, group)


def _attended(
    q_UBND: Tensor, rows_SBD: Tensor, job: KeySelection, of_parts: list[range], allowed_BCK: Tensor, num_keys: int
) -> Tensor:
    """Target distribution of the indexer loss for this rank's queries, [B, C, K]: attention probabilities summed over
    the heads of all ranks and normalised. `of_parts`: rows of the queries of every part."""
    wide, parts = internal_dtype(q_UBND.dtype), len(of_parts)
    rows = torch.cat([torch.arange(part.start, part.stop, device=q_UBND.device) for part in of_parts])
    if parts > 1 and job.config.sparse_indexer_loss:
        # the other ranks choose the keys of their queries
        bits = pack_bits(allowed_BCK, num_keys).transpose(0, 1)
        allowed = unpack_bits(_gathered(bits, job.heads).transpose(0, 1), num_keys)
    elif parts > 1:
        allowed = job.queries.visible(rows, num_keys)
    else:
        allowed = allowed_BCK
    q_BZD, heads = q_UBND[rows].permute(1, 2, 0, 3).flatten(1, 2), q_UBND.shape[2]
    logits_BNCK = bmm_with_dtype(q_BZD, rows_SBD[:num_keys].permute(1, 2, 0), wide).unflatten(1, (heads, -1))
    logits_BNCK.mul_(job.softmax_scale).masked_fill_(~allowed[:, None], -torch.inf)
    total_BCK = logits_BNCK.softmax(dim=-1).sum(dim=1)
    # collective over tp: all-reduce of one value per query and key; the target of the loss has no gradient
    if parts > 1:
        whole = total_BCK.transpose(0, 1).contiguous()
        own = whole.new_empty(len(whole) // parts, *whole.shape[1:])
        total_BCK = reduce_scatter_flat(own, whole, job.heads).transpose(0, 1)
    elif job.heads.size > 1:
        total_BCK = all_reduce_(total_BCK, job.heads)
    return total_BCK / total_BCK.sum(dim=-1, keepdim=True)


def select_keys(
    q_RBID: Tensor, k_SBD: Tensor, w_RBI: Tensor, q_UBND: Tensor, rows_SBD: Tensor, job: KeySelection
) -> tuple[Tensor, Tensor]:
    """Returns the ids of the keys that each query attends to, int32 [U, B, K], ascending and padded with -1, and this
    rank's term of the indexer loss, a scalar in the internal dtype.

    `q_RBID`, `w_RBI`: queries [R, B, I, D] of the I heads of the indexer, and their weights, for this rank's part of
    the U queries. `k_SBD`: its keys of all positions. `q_UBND`, `rows_SBD`: queries of attention, and keys that all its
    heads share; the loss has no gradient for them.
    """
    given = q_RBID, k_SBD, w_RBI, q_UBND.detach(), rows_SBD.detach()
    return _SelectKeys.apply(*given, job)
