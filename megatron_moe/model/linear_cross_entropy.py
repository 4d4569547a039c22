"""Head and loss together, a few tokens at a time: the logits of all tokens never exist.

The forward keeps the hidden states and the losses. The backward makes the logits of every chunk again, and with them
the chunk's share of all gradients: one more product with the head's matrix, for V / chunk-th of the memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.autograd import give
from megatron_moe.kernels.ops import Kernels, Operand, internal_dtype
from megatron_moe.kernels.reference import store
from megatron_moe.model.cross_entropy import cross_entropy
from megatron_moe.parallel.context import Group


def linear_cross_entropy(
    kernels: Kernels,
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    group: Group,
    chunk: int,
) -> Tensor:
    """`cross_entropy` of hidden times weight transposed plus bias -> [T]; `chunk` tokens at a time.

    Weight and bias are this rank's part of the vocabulary, and so is the gradient of the hidden states that they give.
    """
    settings = _Settings(kernels, group, chunk)
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, bias_V, labels_T, settings)  # type: ignore[no-untyped-call,no-any-return]


@dataclass(frozen=True)
class _Settings:
    kernels: Kernels
    group: Group
    chunk: int

    def slices(self, num_tokens: int) -> Iterator[slice]:
        """Of no tokens one, and empty."""
        for start in range(0, max(num_tokens, 1), self.chunk):
            yield slice(start, min(start + self.chunk, num_tokens))

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        return self.kernels.linear_forward(Operand(data=hidden_TH), Operand(data=weight_VH), bias_V)

    def loss(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        return cross_entropy(self.kernels, logits_TV, labels_T, self.group)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_T: Tensor, settings: _Settings
    ) -> Tensor:
        loss_T = hidden_TH.new_empty(len(labels_T), dtype=internal_dtype(hidden_TH.dtype))
        for rows in settings.slices(len(labels_T)):
            loss_T[rows] = settings.loss(settings.logits(hidden_TH[rows], weight_VH, bias_V), labels_T[rows])
        ctx.save_for_backward(hidden_TH, labels_T, bias_V)
        ctx.weight, ctx.settings = weight_VH, settings
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, labels_T, bias_V = ctx.saved_tensors
        work = _Gradients(ctx.settings, hidden_TH, ctx.weight, bias_V, labels_T, grads[0])
        grad_weight = give(ctx.weight, work.run) if ctx.needs_input_grad[1] else None
        if work.grad_hidden_TH is None:  # nobody wants the weight's gradient, or only later
            work.run(None, False)
        grad_bias = work.grad_bias_V if ctx.needs_input_grad[2] else None
        return work.grad_hidden_TH, grad_weight, grad_bias, None, None


class _Gradients:
    """The backward, chunk by chunk."""

    def __init__(
        self,
        settings: _Settings,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        grad_T: Tensor,
    ) -> None:
        self._settings, self._grad_T = settings, grad_T
        self._hidden_TH, self._weight_VH, self._bias_V, self._labels_T = hidden_TH, weight_VH, bias_V, labels_T
        self.grad_hidden_TH: Tensor | None = None
        self.grad_bias_V: Tensor | None = None

    def run(self, out: Tensor | None, accumulate: bool) -> None:
        """The weight's gradient goes to `out`, if there is one; hidden states and bias get theirs the first time."""
        # chunks are added up in the internal dtype, whatever the dtype of the result
        wide = out
        if out is not None and out.dtype is not internal_dtype(out.dtype):
            wide = torch.empty_like(out, dtype=internal_dtype(out.dtype))
        first_time, biases = self.grad_hidden_TH is None, []
        grad_hidden_TH = torch.empty_like(self._hidden_TH) if self.grad_hidden_TH is None else self.grad_hidden_TH
        for rows in self._settings.slices(len(self._labels_T)):
            grad_TV = self._of_logits(rows)
            grad = Operand(data=grad_TV)
            if wide is not None:
                adding = rows.start > 0 or (accumulate and wide is out)
                self._settings.kernels.linear_weight_grad(grad, Operand(data=self._hidden_TH[rows]), wide, adding)
            if first_time:
                grad_hidden_TH[rows] = self._settings.kernels.linear_input_grad(grad, Operand(data=self._weight_VH))
                if self._bias_V is not None:
                    biases.append(grad_TV.sum(dim=0, dtype=internal_dtype(grad_TV.dtype)))
        self.grad_hidden_TH = grad_hidden_TH
        if biases and self._bias_V is not None:
            self.grad_bias_V = torch.stack(biases).sum(dim=0).to(self._bias_V.dtype)
        if out is not None and wide is not None and wide is not out:
            store(out, wide, accumulate)

    def _of_logits(self, rows: slice) -> Tensor:
        """Gradient of the logits of some tokens."""
        logits_TV = self._settings.logits(self._hidden_TH[rows], self._weight_VH.detach(), self._bias_V)
        logits_TV = logits_TV.detach().requires_grad_()
        with torch.enable_grad():
            loss_T = self._settings.loss(logits_TV, self._labels_T[rows])
        (grad_TV,) = torch.autograd.grad(loss_T, logits_TV, self._grad_T[rows])
        return grad_TV
