"""From the residual stream to logits, and to the loss of every token."""

from torch import Tensor, nn

from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.cross_entropy import cross_entropy
from megatron_moe.model.linear_cross_entropy import linear_cross_entropy
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.parallel.tensor import enter_tensor_parallel
from megatron_moe.precision.linear import column_product
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.params import ParamMeta


class Head(nn.Module):
    """logits = hidden W^T + b over the padded vocabulary. When tied, W is the word embedding and is handed in.

    A tensor parallel rank makes the logits of its part of the vocabulary, V / tp below, for all positions.
    """

    def __init__(self, spec: ModelSpec, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.ctx = ctx
        self.kernels = kernels
        self.loss_chunk = spec.loss_chunk
        self.weight = None
        if not spec.tied_embeddings:
            weight = ParamMeta(role="head", fan_in=spec.hidden_size, tp_dim=0)
            self.weight = new_parameter((spec.vocab_size, spec.hidden_size), weight, ctx)
        self.bias = None
        if spec.head_bias:
            bias = ParamMeta(role="bias", init="zeros", tp_dim=0, decay=False)
            self.bias = new_parameter((spec.vocab_size,), bias, ctx)

    def forward(
        self,
        hidden_SBH: Tensor,
        tied_VH: Tensor | None = None,
        *,
        labels_BS: Tensor | None = None,
        detach: bool = False,
    ) -> Tensor:
        """-> logits [S, B, V / tp], or with labels the loss of every token. `detach`: the head is used, not trained."""
        weight_VH: Tensor | None = self.weight if tied_VH is None else tied_VH
        bias_V: Tensor | None = self.bias
        assert weight_VH is not None, "a tied head needs the word embedding"
        if detach:
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        if labels_BS is not None and self.loss_chunk is not None:
            return self._chunked_loss(hidden_SBH, weight_VH, bias_V, labels_BS, self.loss_chunk)
        logits_SBV = column_product(hidden_SBH, weight_VH, bias_V, self.ctx, self.kernels)
        return logits_SBV if labels_BS is None else self.loss(logits_SBV, labels_BS)

    def _chunked_loss(
        self, hidden_SBH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_BS: Tensor, chunk: int
    ) -> Tensor:
        """The loss without the logits of all tokens -> [B, S]"""
        whole_SBH = enter_tensor_parallel(hidden_SBH, self.ctx)
        seq, batch, hidden = whole_SBH.shape
        tp, labels_T = self.ctx.group("tp"), labels_BS.T.reshape(-1)
        loss_T = linear_cross_entropy(
            self.kernels, whole_SBH.reshape(-1, hidden), weight_VH, bias_V, labels_T, tp, chunk
        )
        return loss_T.view(seq, batch).T

    def loss(self, logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
        """-log p(label) of every token -> [B, S] in promote(fp32, dtype)."""
        seq, batch, vocab = logits_SBV.shape
        loss_T = cross_entropy(self.kernels, logits_SBV.view(-1, vocab), labels_BS.T.reshape(-1), self.ctx.group("tp"))
        return loss_T.view(seq, batch).T
