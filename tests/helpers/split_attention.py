"""Context-parallel attention with ranks as threads, compared with one rank."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.context_ring import RingBuffers
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.tp_overlap import SLOT_ALIGN
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.core_attention import core_attention
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import Chunks, SequencePart, select_positions, split_positions
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers, PeerRing
from megatron_moe.parallel.sequence_shards import PeerShards
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import make_mb, randn
from tests.helpers.tolerances import FP64_LAYOUT

KERNELS = reference.bundle()
SEQ, BATCH = 24, 2


@dataclass(frozen=True)
class Case:
    """Sizes and masks of an attention op."""

    heads: int = 4
    groups: int = 2
    width: int = 6
    value_width: int = 5
    sinks: bool = False
    segments: tuple[int, ...] | None = None
    """Document number of every position; the second sequence of the batch has them reversed."""
    core: tuple[tuple[str, Any], ...] = ()
    seq: int = SEQ

    @property
    def config(self) -> CoreAttentionConfig:
        return replace(CoreAttentionConfig(softmax_scale=0.4, sinks=self.sinks), **dict(self.core))

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Inputs of the whole sequence and the output gradient."""
        shapes = {
            "q": (self.seq, BATCH, self.heads, self.width),
            "k": (self.seq, BATCH, self.groups, self.width),
            "v": (self.seq, BATCH, self.groups, self.value_width),
            "grad": (self.seq, BATCH, self.heads, self.value_width),
        }
        drawn = {name: randn(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
        drawn |= {"sinks": randn(self.heads, seed=9)} if self.sinks else {}
        return {name: x.to(dtype) for name, x in drawn.items()}

    def segments_BS(self) -> Tensor | None:
        if self.segments is None:
            return None
        line = torch.tensor(self.segments)
        return torch.stack([line, (line.max() - line).flip(0)])


def attend(
    case: Case,
    tensors: dict[str, Tensor],
    mb: Any,
    ctx: ParallelContext,
    config: CoreAttentionConfig,
    kernels: Kernels = KERNELS,
    peers: ContextPeers = NO_PEERS,
) -> dict[str, Tensor]:
    """Output and the gradients of q, k, v and sinks."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items() if name != "grad"}
    inputs = leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks")
    out = core_attention(*inputs, config, mb, "attention", ctx, kernels, peers)
    out.backward(tensors["grad"])
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def whole(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Computes attention on one rank."""
    mb = make_mb(BATCH, case.seq, segments_BS=case.segments_BS())
    return attend(case, case.tensors(dtype), mb, ParallelContext.single(), case.config)


def of_rank(tensors: dict[str, Tensor], chunks: Chunks) -> dict[str, Tensor]:
    """Selects the positions of a rank from the tensors of the whole sequence."""
    return {
        name: x if name == "sinks" else torch.cat([x[chunk.start : chunk.stop] for chunk in chunks])
        for name, x in tensors.items()
    }


def split(
    case: Case,
    parallel: ParallelConfig,
    exchange: Any,
    dtype: torch.dtype = torch.float64,
    kernels: Kernels = KERNELS,
    *,
    by_copies: bool = False,
) -> dict[str, Tensor]:
    """Computes attention on `parallel.cp` ranks; joins results in sequence order and sums sink gradients. `by_copies`:
    ranks copy keys and values from each other's memory."""
    segments_BS = case.segments_BS()
    parts = split_positions(parallel.cp_split, case.seq, parallel.cp)

    def on_rank(ctx: ParallelContext) -> dict[str, Tensor]:
        chunks = parts[ctx.group("cp").rank]
        mine = of_rank(case.tensors(dtype), chunks)
        mb = make_mb(
            BATCH,
            len(mine["q"]),
            segments_BS=None if segments_BS is None else select_positions(segments_BS, chunks),
            whole_segments_BS=segments_BS,
            part=SequencePart(parts, ctx.group("cp").rank),
        )
        peers, size = NO_PEERS, mine["k"].nbytes + mine["v"].nbytes
        if by_copies:
            shards = PeerShards(-(-size // SLOT_ALIGN) * SLOT_ALIGN, ctx, KERNELS.sum_contributions_, "cp")
            peers = ContextPeers(PeerRing(RingBuffers(size, size), ctx), shards)
        return attend(case, mine, mb, ctx, replace(case.config, context_exchange=exchange), kernels, peers)

    results = on_threads(parallel, on_rank)
    places = torch.tensor([place for chunks in parts for chunk in chunks for place in chunk])
    joined = {}
    for name in results[0]:
        values = [result[name] for result in results]
        joined[name] = sum(values) if name == "sinks" else torch.cat(values)[places.argsort()]
    return joined


def check_equal(case: Case, parallel: ParallelConfig, exchange: str) -> None:
    """Checks that output and gradients of the split attention are those of one rank."""
    FP64_LAYOUT.check_all(split(case, parallel, exchange), whole(case), f"{exchange} over {parallel.cp} ranks, {case}")
