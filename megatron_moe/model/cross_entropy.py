"""Cross-entropy over a vocabulary that is cut over tensor parallel ranks (Megatron-LM, arXiv 1909.08053 section 3)."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import Group


def cross_entropy(kernels: Kernels, logits_TV: Tensor, labels_T: Tensor, group: Group) -> Tensor:
    """-log softmax(logits)[label], in promote(fp32, dtype) -> [T], the same on every rank of the group.

    Rank r has logits r * V .. (r + 1) * V - 1 of the whole vocabulary; labels are ids of the whole.
    """
    if group.size == 1:
        return kernels.cross_entropy(logits_TV, labels_T)
    return _CrossEntropy.apply(logits_TV, labels_T, group)  # type: ignore[no-untyped-call,no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """Backward: softmax minus one at the label, of this rank's logits; no rank needs another's."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, group: Group) -> Tensor:
        wide_TV = logits_TV.to(internal_dtype(logits_TV.dtype))
        num_held = wide_TV.shape[1]
        ids_T = labels_T - group.rank * num_held
        held_T = (ids_T >= 0) & (ids_T < num_held)
        ids_T = ids_T.clamp(0, num_held - 1)
        # tp: three all-reduces of one number per token, none in the backward
        peak_T = all_reduce_(wide_TV.amax(dim=-1), group, op="max")
        sum_T = all_reduce_((wide_TV - peak_T[:, None]).exp().sum(dim=-1), group)
        label_T = wide_TV.gather(-1, ids_T[:, None]).squeeze(-1)
        label_T = all_reduce_(torch.where(held_T, label_T, 0), group)
        normalizer_T = peak_T + sum_T.log()
        ctx.save_for_backward(logits_TV, normalizer_T, ids_T, held_T)
        return normalizer_T - label_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, normalizer_T, ids_T, held_T = ctx.saved_tensors
        grad_TV = (logits_TV.to(normalizer_T.dtype) - normalizer_T[:, None]).exp()
        grad_TV.scatter_add_(-1, ids_T[:, None], -held_T.to(grad_TV.dtype)[:, None])
        return (grad_TV * grads[0][:, None]).to(logits_TV.dtype), None, None
