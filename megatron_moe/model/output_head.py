"""Output head: vocabulary-parallel logits and cross-entropy, optionally computed in chunks of tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.model import ModelConfig
from megatron_moe.kernels.autograd import accumulate_grad
from megatron_moe.kernels.ops import Kernels, VocabShard, internal_dtype
from megatron_moe.layers.linear import column_parallel_linear
from megatron_moe.layers.quantized_module import QuantizedModule
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_gather_flat
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.parameter import new_parameter, store
from megatron_moe.parallel.tensor_parallel import enter_tensor_parallel
from megatron_moe.precision.linear_quantizer import LinearQuantizer


class Head(QuantizedModule):
    """Computes logits = hidden W^T + b over the padded vocabulary. With tied embeddings, the caller passes W.

    A tensor-parallel rank computes the logits of its V / tp vocabulary entries for all positions.
    """

    def __init__(
        self, config: ModelConfig, ctx: ParallelContext, kernels: Kernels, quantizer: LinearQuantizer | None = None
    ) -> None:
        super().__init__()
        self.ctx = ctx
        self.kernels = kernels
        self.loss_chunk = config.loss_chunk
        parameters = {spec.name: new_parameter(spec.shape, spec.meta, ctx) for spec in config.head_parameters()}
        self._set_weight(parameters.get("weight"), quantizer)
        self.bias = parameters.get("bias")

    def forward(
        self,
        hidden_SBH: Tensor,
        tied_VH: Tensor | None = None,
        *,
        labels_BS: Tensor | None = None,
        detach: bool = False,
    ) -> Tensor:
        """Returns logits [S, B, V / tp]; with labels, the loss [B, S]. `tied_VH`: weight of the word embedding; None if
        the head has its own weight. `detach`: weight and bias get no gradient."""
        weight_VH: Tensor | None = self.weight if tied_VH is None else tied_VH
        bias_V: Tensor | None = self.bias
        assert weight_VH is not None, "a tied head must be called with the word embedding weight"
        if detach:
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        if labels_BS is not None and self.loss_chunk is not None:
            assert self.quantizer is None, "the chunked loss does not support FP8"
            return self._chunked_loss(hidden_SBH, weight_VH, bias_V, labels_BS, self.loss_chunk)
        logits_SBV = column_parallel_linear(hidden_SBH, weight_VH, bias_V, self.ctx, self.kernels, self.quantizer)
        return logits_SBV if labels_BS is None else self.loss(logits_SBV, labels_BS)

    def _chunked_loss(
        self, hidden_SBH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_BS: Tensor, chunk: int
    ) -> Tensor:
        """Loss [B, S], computed in chunks of `chunk` tokens to avoid materialising all logits. `weight_VH` and `bias_V`
        are this rank's part of the vocabulary."""
        whole_SBH = enter_tensor_parallel(hidden_SBH, self.ctx)
        seq, batch, hidden = whole_SBH.shape
        settings = (self.kernels, self.ctx.group("tp"), chunk)
        hidden_TH, labels_T = whole_SBH.reshape(-1, hidden), labels_BS.T.reshape(-1)
        loss_T: Tensor = _LinearCrossEntropy.apply(hidden_TH, weight_VH, bias_V, labels_T, *settings)
        return loss_T.view(seq, batch).T

    def loss(self, logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
        """Cross-entropy of every token, [B, S] in promote(fp32, dtype), from this rank's part of the logits."""
        seq, batch, vocab = logits_SBV.shape
        loss_T = cross_entropy(self.kernels, logits_SBV.view(-1, vocab), labels_BS.T.reshape(-1), self.ctx.group("tp"))
        return loss_T.view(seq, batch).T


def cross_entropy(kernels: Kernels, logits_TV: Tensor, labels_T: Tensor, group: ProcessGroup) -> Tensor:
    """Cross-entropy -log softmax(logits)[label] of every token: [T] in promote(fp32, dtype), equal on all ranks.

    Logits are sharded by vocabulary: rank r of `group` holds entries r * V .. (r + 1) * V - 1. Labels are global ids.
    """
    if group.size == 1:
        return kernels.cross_entropy(logits_TV, labels_T)

    def gather_statistics(stats_3T: Tensor) -> Tensor:
        # collective over tp: all-gather of three numbers per token; backward needs no communication. The output is
        # concatenated along dim 0, then viewed as [size, 3, T], because gloo rejects an output with an additional dim.
        whole = stats_3T.new_empty(group.size * len(stats_3T), *stats_3T.shape[1:])
        return all_gather_flat(whole, stats_3T, group).view(group.size, *stats_3T.shape)

    return kernels.cross_entropy(logits_TV, labels_T, VocabShard(group.rank * logits_TV.shape[1], gather_statistics))


class _LinearCrossEntropy(AutogradFunction):
    """Computes output projection and `cross_entropy` [T] in chunks of tokens. The backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        kernels: Kernels,
        group: ProcessGroup,
        chunk: int,
    ) -> Tensor:
        loss_T = hidden_TH.new_empty(len(labels_T), dtype=internal_dtype(hidden_TH.dtype))
        for rows in _slices(len(labels_T), chunk):
            logits_TV = kernels.linear_forward(hidden_TH[rows], weight_VH, bias_V)
            loss_T[rows] = cross_entropy(kernels, logits_TV, labels_T[rows], group)
        ctx.save_for_backward(hidden_TH, labels_T, bias_V)
        ctx.weight, ctx.kernels, ctx.group, ctx.chunk = weight_VH, kernels, group, chunk
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work = _Gradients(ctx, grads[0])
        grad_weight = accumulate_grad(ctx.weight, work.run) if ctx.needs_input_grad[1] else None
        if work.grad_hidden_TH is None:  # the weight needs no gradient, or its gradient is deferred
            work.run(None, False)
        grad_bias = work.grad_bias_V if ctx.needs_input_grad[2] else None
        return work.grad_hidden_TH, grad_weight, grad_bias, None, None, None, None


def _slices(num_tokens: int, chunk: int) -> Iterator[slice]:
    """Yields the token range of each chunk; for zero tokens, one empty range."""
    for start in range(0, max(num_tokens, 1), chunk):
        yield slice(start, min(start + chunk, num_tokens))


class _Gradients:
    """Computes the gradients of `_LinearCrossEntropy` in chunks of tokens."""

    def __init__(self, ctx: Any, grad_T: Tensor) -> None:
        self._hidden_TH, self._labels_T, self._bias_V = ctx.saved_tensors
        self._weight_VH, self._kernels, self._group, self._chunk = ctx.weight, ctx.kernels, ctx.group, ctx.chunk
        self._grad_T = grad_T
        self.grad_hidden_TH: Tensor | None = None
        self.grad_bias_V: Tensor | None = None

    def run(self, out: Tensor | None, accumulate: bool) -> None:
        """Writes the weight gradient to `out`, or adds it if `accumulate`. If `out` is None, skips this gradient.

        The first call also computes the gradients of hidden state and bias."""
        # chunks are accumulated in promote(fp32, dtype)
        wide = out
        if out is not None and out.dtype is not internal_dtype(out.dtype):
            wide = torch.empty_like(out, dtype=internal_dtype(out.dtype))
        first_time, biases = self.grad_hidden_TH is None, []
        grad_hidden_TH = torch.empty_like(self._hidden_TH) if self.grad_hidden_TH is None else self.grad_hidden_TH
        for rows in _slices(len(self._labels_T), self._chunk):
            grad_TV = self._of_logits(rows)
            if wide is not None:
                adds = rows.start > 0 or (accumulate and wide is out)
                self._kernels.linear_weight_grad(grad_TV, self._hidden_TH[rows], wide, adds)
            if first_time:
                grad_hidden_TH[rows] = self._kernels.linear_input_grad(grad_TV, self._weight_VH)
                if self._bias_V is not None:
                    biases.append(grad_TV.sum(dim=0, dtype=internal_dtype(grad_TV.dtype)))
        self.grad_hidden_TH = grad_hidden_TH
        if biases:
            self.grad_bias_V = torch.stack(biases).sum(dim=0).to(self._bias_V.dtype)
        if out is not None and wide is not None and wide is not out:
            store(wide, out, accumulate)

    def _of_logits(self, rows: slice) -> Tensor:
        """Computes the gradient of the logits of one chunk of tokens."""
        logits_TV = self._kernels.linear_forward(self._hidden_TH[rows], self._weight_VH.detach(), self._bias_V)
        logits_TV = logits_TV.detach().requires_grad_()
        with torch.enable_grad():
            loss_T = cross_entropy(self._kernels, logits_TV, self._labels_T[rows], self._group)
        (grad_TV,) = torch.autograd.grad(loss_T, logits_TV, self._grad_T[rows])
        return grad_TV
