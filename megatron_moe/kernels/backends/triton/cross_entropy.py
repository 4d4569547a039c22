"""Cross-entropy per token, with one pass over the logits in forward and one in backward.

The logits are never stored in fp32: the maximum and the sum of exponentials of a row are computed in one online pass
(Milakov and Gimelshein, arXiv 1805.02867), and backward needs only the log-sum-exp. The gradient overwrites the logits,
which are the largest tensor of a step.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two

TILE = 8192
"""Logits that one program processes at a time."""


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """See `Kernels.cross_entropy`."""
    loss_T: Tensor = _CrossEntropy.apply(logits_TV, labels_T)  # type: ignore[no-untyped-call]
    return loss_T


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV, labels_T = logits.contiguous(), labels_T.contiguous()
        num_tokens, vocab = logits_TV.shape
        loss_T = torch.empty(num_tokens, device=logits.device, dtype=torch.float32)
        normalizer_T = torch.empty_like(loss_T)
        tile = min(TILE, power_of_two(vocab))
        if num_tokens:
            _cross_entropy_forward[(num_tokens,)](
                logits_TV, labels_T, loss_T, normalizer_T, vocab, TILE=tile, num_warps=8
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
                logits_TV, labels_T, normalizer_T, grads[0].contiguous(), vocab, TILE=tile
            )
        increment_version(logits_TV)  # autograd then rejects a second backward
        return logits_TV.detach(), None


@triton.jit
def _cross_entropy_forward(logits_ptr, labels_ptr, loss_ptr, normalizer_ptr, vocab, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * vocab
    columns = tl.arange(0, TILE)
    # the lowest finite number instead of -inf, because -inf - (-inf) is nan
    peak = -3.4028234663852886e38
    total = 0.0
    for start in range(0, vocab, TILE):
        held = start + columns < vocab
        logits = tl.load(row_ptr + start + columns, mask=held, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(logits, axis=0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak), axis=0)
        peak = new_peak
    normalizer = peak + tl.log(total)
    chosen = tl.load(row_ptr + tl.load(labels_ptr + token)).to(tl.float32)
    tl.store(loss_ptr + token, normalizer - chosen)
    tl.store(normalizer_ptr + token, normalizer)


@triton.jit
def _cross_entropy_backward(logits_ptr, labels_ptr, normalizer_ptr, grad_loss_ptr, vocab, TILE: tl.constexpr):
    """Replaces a tile of logits by its gradient."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = columns < vocab
    tile_ptr = logits_ptr + token * vocab + columns
    logits = tl.load(tile_ptr, mask=held, other=float("-inf")).to(tl.float32)
    probs = tl.exp(logits - tl.load(normalizer_ptr + token))
    probs -= tl.where(columns == tl.load(labels_ptr + token), 1.0, 0.0)
    grad = probs * tl.load(grad_loss_ptr + token).to(tl.float32)
    tl.store(tile_ptr, grad.to(logits_ptr.dtype.element_ty), mask=held)
