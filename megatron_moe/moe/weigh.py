"""Results of experts times the probabilities of their rows: the standard permutation, which keeps the results."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype


def weigh(rows_RH: Tensor, probs_R: Tensor) -> Tensor:
    """[R, H] times [R]; rows whose probability is 0 hold nothing: they give 0 and get no gradient.

    Multiplied and summed in the internal dtype. For the backward the rows are kept in their own dtype, R * H numbers,
    and the probabilities. Gradients: of a row its own times the probability, of a probability the inner product of the
    row and its gradient.
    """
    weighed: Tensor = _Weigh.apply(rows_RH, probs_R)  # type: ignore[no-untyped-call]
    return weighed


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, probs_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RH, probs_R)
        return _times(rows_RH, probs_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_RH,), (rows_RH, probs_R) = grads, ctx.saved_tensors
        grad_rows = grad_probs = None
        if ctx.needs_input_grad[0]:
            grad_rows = _times(grad_RH, probs_R)
        if ctx.needs_input_grad[1]:
            products_RH = grad_RH.to(internal_dtype(grad_RH.dtype), copy=True).mul_(rows_RH)
            grad_probs = products_RH.sum(dim=-1).masked_fill_(probs_R == 0, 0).to(probs_R.dtype)
        return grad_rows, grad_probs


def _times(rows_RH: Tensor, probs_R: Tensor) -> Tensor:
    wide = internal_dtype(rows_RH.dtype)
    return (rows_RH * probs_R.to(wide)[:, None]).masked_fill_((probs_R == 0)[:, None], 0).to(rows_RH.dtype)
