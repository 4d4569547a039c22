"""The model: embedding, layers, final norm, head, and optionally multi-token prediction.

A pipeline stage holds some of the layers and perhaps the first or the last part; the whole model is the stage that
holds everything. A rank with several stages holds their parts in one module, so that parameters have the same names in
every layout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import MicroBatch, TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.keeping import Keeping
from megatron_moe.model.block import Block, make_block
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.head import Head
from megatron_moe.model.mtp import MTP, Ahead, targets
from megatron_moe.model.norm import Norm
from megatron_moe.model.rope import Rotations
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import gather_from
from megatron_moe.specs.model import ModelSpec, MTPSpec
from megatron_moe.specs.pipeline.layout import StageSpec, even_layout
from megatron_moe.specs.pipeline.slots import Step


@dataclass(frozen=True)
class LossOutput:
    """Losses of every token, in promote(fp32, dtype), not yet weighted."""

    loss_BS: Tensor
    mtp_losses: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    """(loss_BS, weights_BS, sum of the weights over the whole sequence) of every depth of multi-token prediction."""


class Decoder(nn.Module):
    """The layers of a rank under their global indices, and the final norm where the last layer is."""

    def __init__(
        self,
        spec: ModelSpec,
        chunks: Sequence[StageSpec],
        ctx: ParallelContext,
        kernels: Kernels,
        keeping: Keeping,
    ) -> None:
        super().__init__()
        self.chunks = tuple(chunks)
        self.keeping = keeping
        held = [i for chunk in chunks for i in chunk.layers]
        blocks = {str(i): make_block(spec.layers[i], i, f"decoder.layers.{i}", ctx, kernels, keeping) for i in held}
        self.layers = nn.ModuleDict(blocks)
        self.final_layernorm = None
        if any(chunk.final_norm for chunk in chunks):
            self.final_layernorm = Norm(spec.norm, spec.hidden_size, ctx, kernels)

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta, chunk: int = 0) -> Tensor:
        """The layers of one chunk: [S, B, H] -> [S, B, H]"""
        layers = iter(self.chunks[chunk].layers)
        for number, twice in self.keeping.layers(len(self.chunks[chunk].layers)):
            run = partial(self._run, [next(layers) for _ in range(number)])
            hidden_SBH = self.keeping.again(run, hidden_SBH, meta=meta) if twice else run(hidden_SBH, meta)
        if self.final_layernorm is not None and self.chunks[chunk].final_norm:
            hidden_SBH = self.final_layernorm(hidden_SBH)
        return hidden_SBH

    def _run(self, layers: Sequence[int], hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        for i in layers:
            hidden_SBH = self.layers[str(i)](hidden_SBH, meta)
        return hidden_SBH


class GPT(nn.Module):
    """A decoder-only language model, or the chunks of it that a pipeline rank holds.

    1. embed the tokens, or take the hidden state of the stage before
    2. run the layers
    3. in the last stage: head and loss per token, then the same for every depth of multi-token prediction

    Args:
        chunks: the stages that this rank holds; none given: one stage that is the whole model.
        keeping: what waits for the backward in another form; None: nothing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        chunks: Sequence[StageSpec] = (),
        keeping: Keeping | None = None,
    ) -> None:
        super().__init__()
        self.keeping = keeping = keeping or Keeping()
        self.spec = spec
        self.ctx = ctx
        self.chunks = tuple(chunks) or whole_model(spec)
        has_loss = any(chunk.loss for chunk in self.chunks)
        has_mtp = any(chunk.num_mtp for chunk in self.chunks)
        # The head reads the embedding too when they are tied, and so does multi-token prediction.
        if any(chunk.embedding for chunk in self.chunks) or has_mtp or has_loss and spec.tied_embeddings:
            self.embedding = Embedding(spec, ctx, kernels)
        self.decoder = Decoder(spec, self.chunks, ctx, kernels, keeping)
        self.mtp = MTP(spec, ctx, kernels, keeping) if has_mtp else None
        self.output_layer = Head(spec, ctx, kernels) if has_loss else None
        mixers = [spec.layers[i].mixer for chunk in self.chunks for i in chunk.layers]
        self.rotations = Rotations(mixers + ([spec.layers[-1].mixer] if has_mtp else []), ctx)

    def forward(self, batch: MicroBatch, received: Tensor | None = None, *, chunk: int = 0) -> LossOutput | Tensor:
        """One stage: the losses of a microbatch; before the last stage what the next one receives.

        Between stages travels the hidden state [S, B, H], and behind a stage that runs multi-token prediction for the
        last one the hidden states of all depths, [(1 + D) S, B, H]. The first stage receives nothing. Multi-token
        prediction serves training only and is left out in evaluation.
        """
        stage = self.chunks[chunk]
        batch = replace(batch, meta=self.rotations.attach(batch.meta))
        if stage.loss:
            return self._losses(batch, received, chunk)
        hidden_SBH = self._hidden(batch.tokens_BS, batch.meta, received, chunk)
        if self.mtp is None or not stage.num_mtp or not batch.meta.training:
            return hidden_SBH
        return torch.cat([hidden_SBH, *(ahead.hidden_SBH for ahead in self.mtp(hidden_SBH, batch, self.embedding))])

    def steps(self, batch: MicroBatch, chunk: int = 0) -> list[Step]:
        """`forward` of one stage in training, node by node (`pair_slots`). The first step takes what the stage
        receives, each leaves what the next one takes, and the last what `forward` returns."""
        stage = self.chunks[chunk]
        batch = replace(batch, meta=self.rotations.attach(batch.meta))
        steps: list[Step] = []
        if stage.embedding:
            steps.append(Step("embedding", None, lambda _: self._embed(batch.tokens_BS, batch.meta)))
        for position, i in enumerate(stage.layers):
            block = self.decoder.layers[str(i)]
            assert isinstance(block, Block), f"layer {i} is a {type(block).__name__}"
            steps += block.steps(position, batch.meta)
        if stage.final_norm and self.decoder.final_layernorm is not None:
            steps[-1] = _then(steps[-1], self.decoder.final_layernorm)
        if stage.num_mtp:
            assert self.mtp is not None, "multi-token prediction stands in no stage"
            first, *others = self.mtp.steps(batch, self.embedding, len(stage.layers))
            steps += [replace(first, run=lambda hidden_SBH: first.run((hidden_SBH,))), *others]
        if stage.loss:
            return [*steps, Step("head", None, lambda hidden: self._losses_of(hidden, batch))]
        return [*steps[:-1], _then(steps[-1], torch.cat)] if stage.num_mtp else steps

    def _losses_of(self, hidden: Tensor | tuple[Tensor, ...], batch: MicroBatch) -> LossOutput:
        """Head and loss of the hidden states of all depths, which another stage sent as one tensor."""
        depths = self.spec.mtp.num_layers if self.spec.mtp else 0
        if isinstance(hidden, Tensor):
            hidden = hidden.chunk(1 + depths) if depths else (hidden,)
        own_SBH, *others = hidden
        loss_BS = self._loss(own_SBH, batch.labels_BS)
        ahead = (Ahead(h, *target) for h, target in zip(others, targets(batch, depths), strict=True))
        return LossOutput(loss_BS, tuple(self._mtp_loss(each) for each in ahead))

    def _losses(self, batch: MicroBatch, received: Tensor | None, chunk: int) -> LossOutput:
        """The last stage. Multi-token prediction was run by it or by a stage before."""
        depths = self.spec.mtp.num_layers if self.spec.mtp and batch.meta.training else 0
        earlier: list[Tensor] = []
        if depths and not self.chunks[chunk].num_mtp:
            assert received is not None, "the loss stage received no hidden states"
            received, *earlier = received.chunk(1 + depths)
        hidden_SBH = self._hidden(batch.tokens_BS, batch.meta, received, chunk)
        loss_BS = self._loss(hidden_SBH, batch.labels_BS)
        if not depths:
            return LossOutput(loss_BS)
        ahead: Iterable[Ahead]
        if earlier:
            ahead = (Ahead(h, *target) for h, target in zip(earlier, targets(batch, depths), strict=True))
        else:
            assert self.mtp is not None, "multi-token prediction stands in no stage"
            ahead = self.mtp(hidden_SBH, batch, self.embedding)
        return LossOutput(loss_BS, tuple(self._mtp_loss(each) for each in ahead))

    def logits(self, tokens_BS: Tensor, meta: TokenMeta, hidden_SBH: Tensor | None = None) -> Tensor:
        """Logits of every position over the padded vocabulary, [S, B, V]. Last stage only."""
        meta = self.rotations.attach(meta)
        logits_SBV = self._head(self._hidden(tokens_BS, meta, hidden_SBH, len(self.chunks) - 1), self._tied_VH)
        # tp: all-gather of S * B * V elements, backward this rank's part of the vocabulary
        return gather_from(logits_SBV, self.ctx.group("tp"), dim=-1)

    def _hidden(self, tokens_BS: Tensor, meta: TokenMeta, received_SBH: Tensor | None, chunk: int) -> Tensor:
        assert meta.cu_seqlens is None or meta.segments_BS is not None, "packed sequences need their segments as well"
        assert self.chunks[chunk].embedding == (received_SBH is None), (
            "the first stage, and only it, starts from tokens"
        )
        if received_SBH is None:
            received_SBH = self._embed(tokens_BS, meta)
        return self.decoder(received_SBH, meta, chunk)

    def _embed(self, tokens_BS: Tensor, meta: TokenMeta) -> Tensor:
        embedded_SBH: Tensor = self.embedding(tokens_BS, meta.positions_BS, meta)
        return embedded_SBH

    @property
    def _tied_VH(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.spec.tied_embeddings else None

    def _loss(self, hidden_SBH: Tensor, labels_BS: Tensor, *, detach: bool = False) -> Tensor:
        loss_BS: Tensor = self._head(hidden_SBH, self._tied_VH, labels_BS=labels_BS, detach=detach)
        return loss_BS

    def _mtp_loss(self, ahead: Ahead) -> tuple[Tensor, Tensor, Tensor]:
        detach = self.spec.mtp is not None and self.spec.mtp.detach_heads
        return self._loss(ahead.hidden_SBH, ahead.labels_BS, detach=detach), ahead.weights_BS, ahead.num_tokens

    @property
    def _head(self) -> Head:
        assert self.output_layer is not None, "only the last stage has a head"
        return self.output_layer


def _then(step: Step, last: Callable[[Any], Any]) -> Step:
    """The step with something behind it."""
    return replace(step, run=lambda state: last(step.run(state)))


def whole_model(spec: ModelSpec) -> tuple[StageSpec]:
    """The only stage of a pipeline of one."""
    (stage,) = even_layout(len(spec.layers), num_mtp=spec.mtp.num_layers if spec.mtp else 0).stages
    return (stage,)


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
    num_parts = 1 if batch.meta.part is None else batch.meta.part.num_parts
    scalar = total if per_token else total / tokens.clamp(min=1) * num_parts
    if mtp is not None:
        for depth, (loss_BS, weights_BS, num_ahead) in enumerate(output.mtp_losses, start=1):
            mean = (loss_BS * weights_BS).sum() / num_ahead.clamp(min=1)
            share = mtp.loss_scaling_factor / mtp.num_layers
            scalar = scalar + share * (mean * (tokens if per_token else num_parts))
            if batch.meta.tally is not None:
                batch.meta.tally.record(f"mtp_{depth} loss", mean * num_parts)
    return scalar, {"lm loss": (total.detach(), own_tokens.detach())}
