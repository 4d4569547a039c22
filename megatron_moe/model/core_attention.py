"""Core attention, softmax(q k^T * scale + mask) v, for the heads of this tensor-parallel rank.

Each context-parallel rank holds one or more chunks of the sequence (`TokenMeta.part`). `--cp-comm-type` selects one of
four communication types, which all compute the same attention:

  p2p        Keys and values are sent around the ring; each rank merges the outputs and log-sum-exps of all parts
             (arXiv 2310.01889). In backward, keys, values and their gradients are sent around the ring. GPUs of one
             host copy them (`parallel/peer_ring.py`).
  allgather  Keys and values of all ranks are gathered; their gradients are reduce-scattered. GPUs of one host copy
             them (`parallel/sequence_shards.py`).
  a2a        Heads are scattered and the sequence is gathered: each rank has all positions for its share of the heads
             (arXiv 2309.14509).
  a2a+p2p    a2a within groups of adjacent ranks, p2p between these groups.

Masks are computed from positions and document ids in the whole sequence, never from local indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.attention_blocks import chunks_with_first_row
from megatron_moe.kernels.ops import (
    AttentionBlock,
    AttentionInputs,
    AttentionResult,
    Kernels,
    PositionSpan,
    internal_dtype,
)
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.context_parallel import (
    Chunks,
    Ring,
    SequencePart,
    gather_heads,
    merged_chunks,
    order_by_position,
    order_by_rank,
    pack_keys_values,
    scatter_heads,
    select_positions,
    unpack_keys_values,
)
from megatron_moe.parallel.exchange import Wait
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers
from megatron_moe.parallel.rng import Key


class Heads(NamedTuple):
    """Queries, keys, values and attention sinks of this rank's heads."""

    q_SBND: Tensor
    k_SBGD: Tensor
    v_SBGE: Tensor
    sinks_N: Tensor | None


class LogitMaxima(NamedTuple):
    """Largest logits of the heads of this rank, which attention updates in place."""

    values_N: Tensor
    least: float
    """Smallest logit of interest; smaller maxima may be missing."""


def core_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    sinks_N: Tensor | None,
    config: CoreAttentionConfig,
    mb: MicrobatchContext,
    site: str,
    ctx: ParallelContext,
    kernels: Kernels,
    peers: ContextPeers = NO_PEERS,
    maxima: LogitMaxima | None = None,
) -> Tensor:
    """Attention output [S, B, N, E] of this rank's N heads in G query groups. `site`: module path, for dropout keys.
    `maxima`: largest logits to update; None if they are not computed."""
    heads = Heads(q_SBND, k_SBGD, v_SBGE, sinks_N)
    part = mb.tokens.part
    is_split = part is not None and len(part.of_ranks) > 1
    segments_BS = mb.tokens.whole_segments_BS if is_split else mb.tokens.segments_BS
    attention = _CoreAttention(config, segments_BS, mb.key(site), ctx, kernels, peers, maxima)
    if part is not None and is_split:
        return attention.over_ranks(heads, part)
    assert part is not None or ctx.group("cp").size == 1, "TokenMeta.part is not set on a context-parallel rank"
    return attention.whole(heads)


@dataclass(frozen=True)
class _CoreAttention:
    """Computes the core attention of one microbatch."""

    config: CoreAttentionConfig
    segments_BS: Tensor | None
    """Document ids of all positions, including those of other ranks; None if every sequence is one document."""
    dropout_key: Key | None
    ctx: ParallelContext
    kernels: Kernels
    peers: ContextPeers
    maxima: LogitMaxima | None

    def whole(self, heads: Heads) -> Tensor:
        """Attention over whole sequences: `heads` contains all positions in ascending order."""
        if self.maxima is not None:  # the fused kernel does not return the log-sum-exps, which maxima need
            span = self._span((range(len(heads.q_SBND)),))
            return self._blockwise(Ring(None), span, (span,), heads)
        (q_SBND, k_SBGD, v_SBGE, sinks_N), tp = heads, self.ctx.group("tp")
        state = (self.config, sinks_N, self.segments_BS, self.dropout_key, (tp.rank, tp.size))
        return self.kernels.attention(AttentionInputs(q_SBND, k_SBGD, v_SBGE, *state))

    def over_ranks(self, heads: Heads, part: SequencePart) -> Tensor:
        """Attention over a sequence that is split over context-parallel ranks."""
        cp = self.ctx.group(part.group)
        match self.config.context_exchange:
            case "p2p":
                return self._ring(self.peers.ring or Ring(cp), part.of_ranks, heads)
            case "allgather":
                return self._gathered(part, heads)
            case "a2a":
                return self._by_heads(cp, None, part.of_ranks, heads)
            case "a2a+p2p":
                return self._by_heads(self.ctx.group("cp_a2a"), self.ctx.group("cp_p2p"), part.of_ranks, heads)

    def _ring(self, ring: Ring, parts: Sequence[Chunks], heads: Heads) -> Tensor:
        """Ring attention. `parts`: for each rank of the ring, the chunks of positions that it holds."""
        # collective over cp or cp_p2p: (size - 1) times k and v of one rank, S * B * G * (D + E) elements each; the
        # same again in backward, plus size times the gradients of k and v in promote(fp32, dtype)
        spans = tuple(self._span(chunks) for chunks in parts)
        return self._blockwise(ring, spans[ring.rank], spans, heads)

    def _gathered(self, part: SequencePart, heads: Heads) -> Tensor:
        """All-gathers keys and values, then computes the attention of each local query chunk to all unmasked keys."""
        own, everywhere = part.chunks, part.of_ranks
        # collective over cp: all-gather of S * B * G * (D + E) elements per rank; backward: reduce-scatter of their
        # gradients
        k_SBGD, v_SBGE = (self.peers.gather(x, part, self.ctx) for x in (heads.k_SBGD, heads.v_SBGE))
        keys = (self._span(merged_chunks(everywhere)),)
        outputs = []
        for chunk, q_SBND in zip(own, heads.q_SBND.split([len(chunk) for chunk in own]), strict=True):
            rows = Heads(q_SBND, k_SBGD, v_SBGE, heads.sinks_N)
            outputs.append(self._blockwise(Ring(None), self._span((chunk,)), keys, rows))
        return torch.cat(outputs)

    def _by_heads(
        self, inner: ProcessGroup, outer: ProcessGroup | None, everywhere: Sequence[Chunks], heads: Heads
    ) -> Tensor:
        """Scatters heads and gathers positions by all-to-all within `inner`, computes the attention, and reverses the
        exchange. `outer`: group for ring attention; None if `inner` has all positions."""
        groups = [everywhere[first : first + inner.size] for first in range(0, len(everywhere), inner.size)]
        held = groups[0 if outer is None else outer.rank]
        sinks_N = None if heads.sinks_N is None else heads.sinks_N.chunk(inner.size)[inner.rank]
        q_SBND, k_SBGD, v_SBGE = heads.q_SBND, *(_enough_groups(x, inner.size) for x in heads[1:3])
        # collective over inner group: S * B * (N * D + G * (D + E)) elements here, S * B * N * E back; backward: the
        # same
        q_SBND, k_SBGD, v_SBGE = (order_by_position(scatter_heads(x, inner), held) for x in (q_SBND, k_SBGD, v_SBGE))
        share, maxima = Heads(q_SBND, k_SBGD, v_SBGE, sinks_N), self.maxima
        if maxima is not None:
            maxima = maxima._replace(values_N=maxima.values_N.chunk(inner.size)[inner.rank])
        of_share = replace(self, maxima=maxima)
        if outer is None:
            out_SBNE = of_share.whole(share)
        else:
            out_SBNE = of_share._ring(Ring(outer), [merged_chunks(group) for group in groups], share)
        return gather_heads(order_by_rank(out_SBNE, held), inner)

    def _blockwise(self, ring: Ring, query: PositionSpan, keys: tuple[PositionSpan, ...], heads: Heads) -> Tensor:
        key = self.dropout_key
        if key is not None:
            key = (*key, "tp", self.ctx.group("tp").rank, "place", query.chunks[0].start)
        blocks = _Blocks(self.kernels, self.config, ring, query, keys, key, self.maxima)
        return _BlockAttention.apply(*heads, blocks)

    def _span(self, chunks: Chunks) -> PositionSpan:
        segments_BS = None if self.segments_BS is None else select_positions(self.segments_BS, chunks)
        return PositionSpan(chunks=chunks, segments_BS=segments_BS)


def _enough_groups(x_SBGD: Tensor, num_ranks: int) -> Tensor:
    """Repeats keys or values of each query group if groups are fewer than ranks, so that each rank has a group."""
    num_groups = x_SBGD.shape[2]
    if num_groups % num_ranks == 0:
        return x_SBGD
    assert num_ranks % num_groups == 0, f"{num_groups} query groups do not divide {num_ranks} context-parallel ranks"
    return x_SBGD.repeat_interleave(num_ranks // num_groups, dim=2)


Mask = tuple[CoreAttentionConfig, PositionSpan, PositionSpan, Key | None]


@dataclass(frozen=True)
class _Blocks:
    """Computes masks from the positions of this rank's queries and of the keys of every rank of a ring."""

    kernels: Kernels
    config: CoreAttentionConfig
    ring: Ring
    query: PositionSpan
    keys: tuple[PositionSpan, ...]
    dropout_key: Key | None
    maxima: LogitMaxima | None

    @cached_property
    def visible(self) -> dict[int, tuple[slice, slice, Mask]]:
        """Index of a rank in the ring -> (rows of this rank's queries, rows of that rank's keys, mask arguments for the
        kernels). Contains only ranks with keys that a query of this rank may attend to (`visible_rows`)."""
        found = {}
        for source, key in enumerate(self.keys):
            seen = visible_rows(self.query.chunks, key.chunks, self.config)
            if seen is not None:
                queries, keys = seen
                dropout_key = None if self.dropout_key is None else (*self.dropout_key, "keys of", source)
                spans = self.query.rows(queries.start, queries.stop), key.rows(keys.start, keys.stop)
                found[source] = queries, keys, (self.config, *spans, dropout_key)
        return found


class _BlockAttention(AutogradFunction):
    """Blockwise attention over the keys and values of all ranks of a ring, one block b per rank.

    Forward: out = sum_b exp(lse_b - lse) out_b with lse = log sum_b exp(lse_b). The sinks are merged first, as a block
    whose output is 0, so that the denominator counts them once.
    Backward: given lse and delta = sum(grad * out) over channels, the gradients of each block are independent.
    """

    @staticmethod
    def forward(
        ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sinks_N: Tensor | None, blocks: _Blocks
    ) -> Tensor:
        out_SBNE, lse_SBN = _before_keys(q_SBND, v_SBGE.shape[3], sinks_N, blocks.config)
        num_left = len(blocks.visible)
        for source, (k_held, v_held) in blocks.ring.circulate(k_SBGD, v_SBGE):
            if source not in blocks.visible:
                continue
            rows, keys, mask = blocks.visible[source]
            given = AttentionBlock(q_SBND[rows], k_held[keys], v_held[keys], *mask)
            num_left -= 1
            if out_SBNE is None or lse_SBN is None:
                out_SBNE, lse_SBN = blocks.kernels.attention_block(given)
            else:
                if num_left:  # later blocks are added in the internal dtype, so the result is rounded only once
                    out_SBNE = out_SBNE.to(lse_SBN.dtype)
                blocks.kernels.attention_block(given, out_SBNE[rows], lse_SBN[rows])
            if blocks.maxima is not None:
                blocks.kernels.max_logits_(given, lse_SBN[rows], *blocks.maxima)
        ctx.blocks = blocks
        assert out_SBNE is not None, "queries must see keys of their own rank"
        out_SBNE = out_SBNE.to(q_SBND.dtype)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, sinks_N, out_SBNE, lse_SBN)
        return out_SBNE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGE, sinks_N, out_SBNE, lse_SBN = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        grad_SBNE, wide, ring = grads[0], lse_SBN.dtype, blocks.ring
        grad_q_SBND: Tensor | None = None
        of_own: tuple[Tensor, Tensor] | None = None
        landing: Wait | None = None
        num_left = len(blocks.visible)
        # in a ring of two ranks, only one gradient is sent, which a kernel may have rounded already
        sent_dtype = q_SBND.dtype if ring.size == 2 else wide
        for source, held in ring.circulate(k_SBGD, v_SBGE):
            grads_kv: tuple[Tensor, Tensor] | None = None
            if source in blocks.visible:
                rows, keys, mask = blocks.visible[source]
                given = AttentionBlock(q_SBND[rows], held[0][keys], held[1][keys], *mask)
                found = AttentionResult(grad_SBNE[rows], out_SBNE[rows], lse_SBN[rows])
                of_queries, *of_keys = blocks.kernels.attention_block_grad(given, found)
                num_left -= 1
                if grad_q_SBND is None:
                    grad_q_SBND = of_queries.to(wide) if num_left > 1 else of_queries
                else:
                    grad_q_SBND[rows].add_(of_queries)
                grads_kv = _of_all_rows(of_keys[0], keys, held[0]), _of_all_rows(of_keys[1], keys, held[1])
            if source == ring.rank:
                of_own = grads_kv
                continue
            # The sum of the gradients is sent around the ring with its keys and ends on the rank that owns the keys.
            if grads_kv is None:
                total = pack_keys_values(*(x.new_zeros(x.shape, dtype=sent_dtype) for x in held))
            else:
                total = pack_keys_values(*grads_kv).to(sent_dtype)
            if landing is not None:
                total += landing()
            landing = ring.send_to_next(total)
        assert grad_q_SBND is not None and of_own is not None, "queries must see keys of their own rank"
        grad_k, grad_v = of_own
        if landing is not None:
            for own, sent in zip(of_own, unpack_keys_values(landing(), k_SBGD.shape[-1]), strict=True):
                own.add_(sent)
        grad_sinks = None
        if sinks_N is not None:
            delta_SBN = (grad_SBNE.to(wide) * out_SBNE).sum(dim=-1)
            grad_sinks = -((sinks_N.to(wide) - lse_SBN).exp() * delta_SBN).sum(dim=(0, 1)).to(sinks_N.dtype)
        return grad_q_SBND.to(q_SBND.dtype), grad_k.to(k_SBGD.dtype), grad_v.to(v_SBGE.dtype), grad_sinks, None


def _before_keys(
    q_SBND: Tensor, value_width: int, sinks_N: Tensor | None, config: CoreAttentionConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Initial output and log-sum-exp [S, B, N] of the online softmax, with the sinks as the only logits; None without
    sinks."""
    if sinks_N is None and not config.off_by_one:
        return None, None
    wide, (seq, batch, heads) = internal_dtype(q_SBND.dtype), q_SBND.shape[:3]
    lse_SBN = q_SBND.new_zeros(batch, heads, seq, dtype=wide).permute(2, 0, 1)  # kernel layout
    if sinks_N is not None:
        lse_SBN[:] = sinks_N
    return q_SBND.new_zeros(seq, batch, heads, value_width, dtype=wide), lse_SBN


def _of_all_rows(part: Tensor, rows: slice, like: Tensor) -> Tensor:
    """Returns a tensor shaped like `like` with `part` in the given rows and zeros in the others."""
    if len(part) == len(like):
        return part
    whole = part.new_zeros(like.shape)
    whole[rows] = part
    return whole


def visible_rows(query: Chunks, key: Chunks, config: CoreAttentionConfig) -> tuple[slice, slice] | None:
    """Smallest ranges of query rows and key rows that contain all (query, key) pairs allowed by the causal mask and the
    window; None if there are none. Document boundaries are ignored.

    With a causal mask and a zigzag split, the ranges halve the work for the keys of every other rank. The work for the
    rank's own keys does not change.
    """
    left, right = config.window or (-1, -1)
    right = 0 if config.causal else right
    of_query: list[int] = []
    of_key: list[int] = []
    for first_query, queries in chunks_with_first_row(query):
        for first_key, keys in chunks_with_first_row(key):
            seeing = _near(queries, keys, before=right, after=left)
            seen = _near(keys, queries, before=left, after=right)
            if seeing and seen:
                of_query += (first_query + place - queries.start for place in (seeing.start, seeing.stop))
                of_key += (first_key + place - keys.start for place in (seen.start, seen.stop))
    if not of_query:
        return None
    return slice(min(of_query), max(of_query)), slice(min(of_key), max(of_key))


def _near(chunk: range, other: range, *, before: int, after: int) -> range:
    """Range of positions p of `chunk` with other.start - before <= p < other.stop + after. If `before` or `after` is
    -1, the limit on that side does not apply."""
    first = chunk.start if before < 0 else max(chunk.start, other.start - before)
    end = chunk.stop if after < 0 else min(chunk.stop, other.stop + after)
    return range(first, max(first, end))
