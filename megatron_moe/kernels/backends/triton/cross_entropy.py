"""Cross-entropy per token, with one pass over the logits in forward and one in backward.

The logits are never stored in fp32: the maximum and the sum of exponentials of a row are computed in one online pass
(Milakov and Gimelshein, arXiv 1805.02867), and backward needs only the log-sum-exp. The gradient overwrites the logits,
which are the largest tensor of a step. Tensor-parallel ranks exchange three numbers per token: maximum, sum and the
logit of the label.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two
from megatron_moe.kernels.ops import VocabShard
from megatron_moe.parallel.autograd_function import AutogradFunction

TILE = 8192
"""Number of logits that a program processes at a time."""
_TOKENS = 256
"""Number of tokens per program that combines statistics over ranks."""


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None = None) -> Tensor:
    return _CrossEntropy.apply(logits_TV, labels_T, shard)


class _CrossEntropy(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels_T: Tensor, shard: VocabShard | None) -> Tensor:
        logits_TV, labels_T = logits.contiguous(), labels_T.contiguous()
        num_tokens, vocab = logits_TV.shape
        loss_T = torch.empty(num_tokens, device=logits.device, dtype=torch.float32)
        normalizer_T = torch.empty_like(loss_T)
        ctx.first = 0 if shard is None else shard.first
        stats_3T = None if shard is None else loss_T.new_empty(3, num_tokens)
        if num_tokens:
            _cross_entropy_forward[(num_tokens,)](
                logits_TV,
                labels_T,
                loss_T,
                normalizer_T,
                stats_3T,
                ctx.first,
                vocab,
                num_tokens,
                TILE=min(TILE, power_of_two(vocab)),
                num_warps=8,
            )
        if shard is not None and stats_3T is not None:
            stats_N3T = shard.gather(stats_3T)
            if num_tokens:
                _combine_statistics[(cdiv(num_tokens, _TOKENS),)](
                    stats_N3T, loss_T, normalizer_T, num_tokens, NUM_RANKS=len(stats_N3T), TOKENS=_TOKENS
                )
        ctx.save_for_backward(logits_TV, labels_T, normalizer_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, labels_T, normalizer_T = ctx.saved_tensors
        num_tokens, vocab = logits_TV.shape
        tile = min(TILE // 2, power_of_two(vocab))
        if num_tokens:
            _cross_entropy_backward[(num_tokens, cdiv(vocab, tile))](
                logits_TV, labels_T, normalizer_T, grads[0].contiguous(), ctx.first, vocab, TILE=tile
            )
        increment_version(logits_TV)  # autograd then rejects a second backward
        return logits_TV.detach(), None, None


@triton.jit
def _cross_entropy_forward(
    logits_ptr, labels_ptr, loss_ptr, normalizer_ptr, stats_ptr, first, vocab, num_tokens, TILE: tl.constexpr
):
    """Writes a token's loss and log-sum-exp (normalizer). If `stats_ptr` is given, writes only the statistics of this
    rank's logits."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * vocab
    columns = tl.arange(0, TILE)
    # the lowest finite number instead of -inf, because -inf - (-inf) is nan
    peak = -3.4028234663852886e38
    total = 0.0
    for start in range(0, vocab, TILE):
        mask = start + columns < vocab
        logits = tl.load(row_ptr + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(logits, axis=0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak), axis=0)
        peak = new_peak
    label = tl.load(labels_ptr + token) - first
    if stats_ptr is not None:
        chosen = tl.load(row_ptr + label, mask=(label >= 0) & (label < vocab), other=0.0).to(tl.float32)
        tl.store(stats_ptr + token, peak)
        tl.store(stats_ptr + num_tokens + token, total)
        tl.store(stats_ptr + 2 * num_tokens + token, chosen)
    else:
        normalizer = peak + tl.log(total)
        tl.store(loss_ptr + token, normalizer - tl.load(row_ptr + label).to(tl.float32))
        tl.store(normalizer_ptr + token, normalizer)


@triton.jit
def _combine_statistics(stats_ptr, loss_ptr, normalizer_ptr, num_tokens, NUM_RANKS: tl.constexpr, TOKENS: tl.constexpr):
    """Computes loss and normalizer of `TOKENS` tokens from the statistics [NUM_RANKS, 3, T] of all ranks."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = tokens < num_tokens
    peak = tl.full((TOKENS,), -3.4028234663852886e38, tl.float32)
    for rank in range(NUM_RANKS):
        peak = tl.maximum(peak, tl.load(stats_ptr + 3 * rank * num_tokens + tokens, mask=exists, other=0.0))
    total = tl.zeros((TOKENS,), tl.float32)
    chosen = tl.zeros((TOKENS,), tl.float32)
    for rank in range(NUM_RANKS):
        of_rank_ptr = stats_ptr + 3 * rank * num_tokens + tokens
        scale = tl.exp(tl.load(of_rank_ptr, mask=exists, other=0.0) - peak)
        total += tl.load(of_rank_ptr + num_tokens, mask=exists, other=1.0) * scale
        chosen += tl.load(of_rank_ptr + 2 * num_tokens, mask=exists, other=0.0)
    normalizer = peak + tl.log(total)
    tl.store(loss_ptr + tokens, normalizer - chosen, mask=exists)
    tl.store(normalizer_ptr + tokens, normalizer, mask=exists)


@triton.jit
def _cross_entropy_backward(logits_ptr, labels_ptr, normalizer_ptr, grad_loss_ptr, first, vocab, TILE: tl.constexpr):
    """Replaces a tile of logits by its gradient."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < vocab
    tile_ptr = logits_ptr + token * vocab + columns
    logits = tl.load(tile_ptr, mask=mask, other=float("-inf")).to(tl.float32)
    probs = tl.exp(logits - tl.load(normalizer_ptr + token))
    probs -= tl.where(columns == tl.load(labels_ptr + token) - first, 1.0, 0.0)
    grad = probs * tl.load(grad_loss_ptr + token).to(tl.float32)
    tl.store(tile_ptr, grad.to(logits_ptr.dtype.element_ty), mask=mask)
