"""Blocks of all ranks of ring attention, computed sequentially on one rank."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.ops import AttentionBlock, AttentionResult, PositionSpan, internal_dtype
from megatron_moe.parallel.context_parallel import Chunks, select_positions


def blocks_of_a_ring(
    kernels: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    config: CoreAttentionConfig,
    parts: tuple[Chunks, ...],
    segments_BS: Tensor | None = None,
) -> dict[str, Tensor]:
    """Output and gradients of q, k and v in the internal format. `inputs`: output gradient, q, k and v of the whole
    sequence."""
    grad, q, k, v = inputs
    wide = internal_dtype(q.dtype)
    totals = [torch.zeros_like(x, dtype=wide) for x in (grad, q, k, v)]
    for query in parts:
        rows = _places(query, q.device)
        seq, batch, heads, _ = grad[rows].shape
        out, lse = torch.zeros_like(grad[rows], dtype=wide), grad.new_full((batch, heads, seq), -torch.inf, dtype=wide)
        found = out, lse.permute(2, 0, 1)
        blocks = []
        for key in parts:
            keys = _places(key, q.device)
            spans = _span(query, segments_BS), _span(key, segments_BS)
            blocks.append(AttentionBlock(q[rows], k[keys], v[keys], config, *spans))
            kernels.attention_block(blocks[-1], *found)
        totals[0][rows] = out
        result = AttentionResult(grad[rows], out.to(q.dtype), found[1])
        for key, block in zip(parts, blocks, strict=True):
            shares = tuple(torch.zeros_like(x, dtype=wide) for x in block[:3])
            kernels.attention_block_grad(block, result, shares)
            keys = _places(key, q.device)
            for total, share, places in zip(totals[1:], shares, (rows, keys, keys), strict=True):
                total[places] += share
    return dict(zip(("out", "grad q", "grad k", "grad v"), totals, strict=True))


def _places(chunks: Chunks, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def _span(chunks: Chunks, segments_BS: Tensor | None) -> PositionSpan:
    return PositionSpan(
        chunks=chunks, segments_BS=None if segments_BS is None else select_positions(segments_BS, chunks)
    )
