"""The model: embedding, layers, final norm, head, and optionally multi-token prediction.

A pipeline stage holds a range of the layers and perhaps the first or the last part; the whole model is the stage that
holds everything. Parameters have the same names in every stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron_moe.data.batch import MicroBatch, TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.block import make_block
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.head import Head
from megatron_moe.model.mtp import MTP
from megatron_moe.model.norm import Norm
from megatron_moe.model.rope import Rotations
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import gather_from
from megatron_moe.specs.model import ModelSpec, MTPSpec


@dataclass(frozen=True)
class LossOutput:
    """Losses of every token, in promote(fp32, dtype), not yet weighted."""

    loss_BS: Tensor
    mtp_losses: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    """(loss_BS, weights_BS, sum of the weights over the whole sequence) of every depth of multi-token prediction."""


class Decoder(nn.Module):
    """The layers of a stage under their global indices, and the final norm where the last layer is."""

    def __init__(self, spec: ModelSpec, layers: range, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        blocks = {str(i): make_block(spec.layers[i], i, f"decoder.layers.{i}", ctx, kernels) for i in layers}
        self.layers = nn.ModuleDict(blocks)
        self.final_layernorm = None
        if len(spec.layers) - 1 in layers:
            self.final_layernorm = Norm(spec.norm, spec.hidden_size, ctx, kernels)

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        for block in self.layers.values():
            hidden_SBH = block(hidden_SBH, meta)
        return hidden_SBH if self.final_layernorm is None else self.final_layernorm(hidden_SBH)


class GPT(nn.Module):
    """A decoder-only language model, or one stage of it.

    1. embed the tokens, or take the hidden state of the stage before
    2. run the layers
    3. in the last stage: head and loss per token, then the same for every depth of multi-token prediction
    """

    def __init__(
        self,
        spec: ModelSpec,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        first: bool = True,
        last: bool = True,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.ctx = ctx
        self.first = first
        self.last = last
        held = range(len(spec.layers)) if layers is None else layers
        # The last stage reads the embedding too, as its head when tied and for multi-token prediction.
        if first or last and (spec.tied_embeddings or spec.mtp):
            self.embedding = Embedding(spec, ctx)
        self.decoder = Decoder(spec, held, ctx, kernels)
        self.mtp = MTP(spec, ctx, kernels) if last and spec.mtp else None
        self.output_layer = Head(spec, ctx, kernels) if last else None
        mixers = [spec.layers[i].mixer for i in held] + ([spec.layers[-1].mixer] if self.mtp else [])
        self.rotations = Rotations(mixers, ctx)

    def forward(self, batch: MicroBatch, hidden_SBH: Tensor | None = None) -> LossOutput | Tensor:
        """The losses of a microbatch; before the last stage its hidden state [S, B, H].

        `hidden_SBH` is what the stage before returned; the first stage takes none. Multi-token prediction serves
        training only and is left out in evaluation.
        """
        batch = replace(batch, meta=self.rotations.attach(batch.meta))
        hidden_SBH = self._hidden(batch.tokens_BS, batch.meta, hidden_SBH)
        if self.output_layer is None:
            return hidden_SBH
        loss_BS = self._loss(hidden_SBH, batch.labels_BS)
        if self.mtp is None or not batch.meta.training:
            return LossOutput(loss_BS)
        return LossOutput(loss_BS, tuple(self._mtp_losses(self.mtp, hidden_SBH, batch)))

    def logits(self, tokens_BS: Tensor, meta: TokenMeta, hidden_SBH: Tensor | None = None) -> Tensor:
        """Logits of every position over the padded vocabulary, [S, B, V]. Last stage only."""
        logits_SBV = self._logits(self._hidden(tokens_BS, self.rotations.attach(meta), hidden_SBH))
        # tp: all-gather of S * B * V elements, backward this rank's part of the vocabulary
        return gather_from(logits_SBV, self.ctx.group("tp"), dim=-1)

    def _hidden(self, tokens_BS: Tensor, meta: TokenMeta, hidden_SBH: Tensor | None) -> Tensor:
        assert meta.cu_seqlens is None or meta.segments_BS is not None, "packed sequences need their segments as well"
        assert self.first == (hidden_SBH is None), "the first stage, and only it, starts from tokens"
        if hidden_SBH is None:
            hidden_SBH = self.embedding(tokens_BS, meta.positions_BS, meta)
        return self.decoder(hidden_SBH, meta)

    def _logits(self, hidden_SBH: Tensor, *, detach: bool = False) -> Tensor:
        tied_VH = self.embedding.word_embeddings.weight if self.spec.tied_embeddings else None
        return self._head(hidden_SBH, tied_VH, detach=detach)

    def _loss(self, hidden_SBH: Tensor, labels_BS: Tensor, *, detach: bool = False) -> Tensor:
        return self._head.loss(self._logits(hidden_SBH, detach=detach), labels_BS)

    def _mtp_losses(
        self, mtp: MTP, hidden_SBH: Tensor, batch: MicroBatch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for ahead in mtp(hidden_SBH, batch, self.embedding):
            loss_BS = self._loss(ahead.hidden_SBH, ahead.labels_BS, detach=mtp.spec.detach_heads)
            yield loss_BS, ahead.weights_BS, ahead.num_tokens

    @property
    def _head(self) -> Head:
        assert self.output_layer is not None, "only the last stage has a head"
        return self.output_layer


def objective(
    output: LossOutput, batch: MicroBatch, *, mtp: MTPSpec | None, per_token: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """What this microbatch is differentiated by, and the (sum, count) pairs it reports.

    By default the weighted mean over its tokens, of which the step takes the mean over microbatches. With `per_token`
    the weighted sum, which the step divides once by the tokens of the global batch. Depth d of multi-token prediction
    adds factor / D times its own mean; with `per_token` that mean times the tokens of the microbatch, so that fewer
    tokens at greater depth weigh as much as all. Records "mtp_{d} loss" in the batch's tally.

    A context-parallel rank has the sum over its part of the sequence, but divides by the tokens of the whole. Its means
    are taken times the number of ranks, because gradients and metrics are averaged over them.
    """
    mask_BS = batch.loss_mask_BS
    total, own_tokens = (output.loss_BS * mask_BS).sum(), mask_BS.sum()
    tokens = own_tokens if batch.whole is None else batch.whole.loss_mask_BS.sum()
    num_parts = 1 if batch.meta.part is None else len(batch.meta.part.of_ranks)
    scalar = total if per_token else total / tokens.clamp(min=1) * num_parts
    if mtp is not None:
        for depth, (loss_BS, weights_BS, num_ahead) in enumerate(output.mtp_losses, start=1):
            mean = (loss_BS * weights_BS).sum() / num_ahead.clamp(min=1)
            share = mtp.loss_scaling_factor / mtp.num_layers
            scalar = scalar + share * (mean * (tokens if per_token else num_parts))
            if batch.meta.tally is not None:
                batch.meta.tally.record(f"mtp_{depth} loss", mean * num_parts)
    return scalar, {"lm loss": (total.detach(), own_tokens.detach())}
