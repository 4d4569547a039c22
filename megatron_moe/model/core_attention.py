"""softmax(q k^T * scale + mask) v for the heads of this tensor parallel rank, over the sequence of all context-parallel
ranks.

Every context-parallel rank holds a few chunks of the sequence (`TokenMeta.part`). What it lacks it gets in one of four
ways, and the result is the same:

  p2p        Keys and values travel around the ring; each part seen gives an output and a log-sum-exp, which merge
             (arXiv 2310.01889). In the backward the gradients of keys and values travel with them.
  allgather  Keys and values of all ranks are gathered; their gradients are reduce-scattered.
  a2a        Heads are scattered and the sequence is gathered: each rank has all places for its share of the heads
             (arXiv 2309.14509).
  a2a+p2p    a2a among neighbouring ranks, p2p among these groups.

Masks follow from places in the whole sequence and the documents there, never from local indices.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels, Span, internal_dtype
from megatron_moe.parallel.alltoall import Landing
from megatron_moe.parallel.context import Group, ParallelContext
from megatron_moe.parallel.ring import Ring, gather_heads, pack, scatter_heads, unpack
from megatron_moe.parallel.rng import Key
from megatron_moe.parallel.sequence_split import Chunks, by_rank, in_order, joined, take_places
from megatron_moe.parallel.tensor import all_gather
from megatron_moe.specs.attention import CoreAttentionSpec


def core_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    sinks_N: Tensor | None,
    spec: CoreAttentionSpec,
    meta: TokenMeta,
    site: str,
    ctx: ParallelContext,
    kernels: Kernels,
) -> Tensor:
    """-> [S, B, N, E]. N and G are this rank's share of the heads; `site` names the dropout."""
    if meta.part is not None:
        return _Split(spec, meta, site, ctx, kernels).attend(q_SBND, k_SBGD, v_SBGE, sinks_N)
    assert ctx.group("cp").size == 1, "context-parallel ranks must know what they hold of the sequence"
    return _whole(q_SBND, k_SBGD, v_SBGE, sinks_N, spec, meta.segments_BS, meta.key(site), ctx, kernels)


def _whole(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    sinks_N: Tensor | None,
    spec: CoreAttentionSpec,
    segments_BS: Tensor | None,
    dropout_key: Key | None,
    ctx: ParallelContext,
    kernels: Kernels,
) -> Tensor:
    tp = ctx.group("tp")
    return kernels.attention(q_SBND, k_SBGD, v_SBGE, spec, sinks_N, segments_BS, dropout_key, (tp.rank, tp.size))


@dataclass(frozen=True)
class _Split:
    """Attention over a sequence of which this rank holds a part."""

    spec: CoreAttentionSpec
    meta: TokenMeta
    site: str
    ctx: ParallelContext
    kernels: Kernels

    def attend(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sinks_N: Tensor | None) -> Tensor:
        cp = self.ctx.group("cp")
        match self.spec.context_exchange:
            case "p2p":
                return self._around(Ring(cp), self._held, q_SBND, k_SBGD, v_SBGE, sinks_N)
            case "allgather":
                return self._gathered(cp, q_SBND, k_SBGD, v_SBGE, sinks_N)
            case "a2a":
                return self._by_heads(cp, None, q_SBND, k_SBGD, v_SBGE, sinks_N)
            case "a2a+p2p":
                inner, outer = self.ctx.group("cp_a2a"), self.ctx.group("cp_p2p")
                return self._by_heads(inner, outer, q_SBND, k_SBGD, v_SBGE, sinks_N)

    @property
    def _held(self) -> tuple[Chunks, ...]:
        assert self.meta.part is not None, "the sequence is whole"
        return self.meta.part.of_ranks

    def _around(
        self,
        ring: Ring,
        parts: Sequence[Chunks],
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Every rank of the ring holds queries, keys and values of its part."""
        # cp or cp_p2p: size - 1 times k and v of one rank, S * B * G * (D + E) elements; backward the same and size
        # times their gradients in promote(fp32, dtype)
        spans = tuple(self._span(chunks) for chunks in parts)
        blocks = _Blocks(self.kernels, self.spec, ring, spans[ring.group.rank], spans, self._block_key)
        return _RingAttention.apply(q_SBND, k_SBGD, v_SBGE, sinks_N, blocks)  # type: ignore[no-untyped-call,no-any-return]

    def _gathered(
        self, cp: Group, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sinks_N: Tensor | None
    ) -> Tensor:
        # cp: k and v of all ranks, size * S * B * G * (D + E) elements; backward: reduce-scatter of as many
        k_SBGD, v_SBGE = (in_order(all_gather(x, cp), self._held) for x in (k_SBGD, v_SBGE))
        alone = Ring(self.ctx.alone)
        keys = self._span(joined(self._held))
        outputs = []
        own = self._held[cp.rank]
        for chunk, rows_SBND in zip(own, q_SBND.split([len(chunk) for chunk in own]), strict=True):
            blocks = _Blocks(self.kernels, self.spec, alone, self._span((chunk,)), (keys,), self._block_key)
            outputs.append(_RingAttention.apply(rows_SBND, k_SBGD, v_SBGE, sinks_N, blocks))  # type: ignore[no-untyped-call]
        return torch.cat(outputs)
