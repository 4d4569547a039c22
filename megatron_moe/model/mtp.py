"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 section 2.2).

Depth d = 1 .. D predicts the token d places further ahead than the model itself:

  z_d = eh_proj([enorm(embedding(tokens moved left by d)); hnorm(h_{d-1})])
  h_d = final_layernorm(layer(z_d))

with h_0 the model's hidden state after its final norm, and the embedding and the head shared with the model. Labels and
loss weights move left with the tokens, so a position whose label would lie beyond the sequence (or its document) has
weight 0. Rotary positions stay those of the hidden state; only learned positions move with the tokens. A
context-parallel rank moves the whole sequence and takes its part, since a place's next may be another rank's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import MicroBatch, TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.keeping import Keeping
from megatron_moe.model.block import make_block
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.norm import Norm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import columns_to_residual
from megatron_moe.precision.linear import Linear
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.pipeline.slots import Step


@dataclass(frozen=True)
class Ahead:
    """One depth's hidden state, and what it is to predict."""

    hidden_SBH: Tensor
    labels_BS: Tensor
    weights_BS: Tensor
    num_tokens: Tensor
    """Sum of the weights over the whole sequence, of which a context-parallel rank has a part."""


class MTPLayer(nn.Module):
    """Joins the hidden state with the embedding of a later token, then one layer of the model's last kind."""

    def __init__(
        self, spec: ModelSpec, depth: int, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping
    ) -> None:
        super().__init__()
        self.ctx = ctx
        hidden = spec.hidden_size
        self.enorm = Norm(spec.norm, hidden, ctx, kernels)
        self.hnorm = Norm(spec.norm, hidden, ctx, kernels)
        self.eh_proj = Linear(2 * hidden, hidden, ctx, kernels, tp_dim=0)
        layer = len(spec.layers) + depth
        self.transformer_layer = make_block(spec.layers[-1], layer, f"{site}.transformer_layer", ctx, kernels, keeping)
        self.final_layernorm = Norm(spec.norm, hidden, ctx, kernels)

    def forward(self, hidden_SBH: Tensor, embedding_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        return self.final_layernorm(self.transformer_layer(self.join(hidden_SBH, embedding_SBH), meta))

    def join(self, hidden_SBH: Tensor, embedding_SBH: Tensor) -> Tensor:
        """What the transformer layer takes."""
        # Others use the hidden state too. Seen as one use of it, this has the same gradient in every order of nodes.
        hidden_SBH = hidden_SBH.view_as(hidden_SBH)
        joined = torch.cat([self.enorm(embedding_SBH), self.hnorm(hidden_SBH)], dim=-1)
        return columns_to_residual(self.eh_proj(joined), self.ctx)


class MTP(nn.Module):
    """The depths in order; one layer serves them all when it is repeated."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext, kernels: Kernels, keeping: Keeping) -> None:
        super().__init__()
        self.keeping = keeping
        assert spec.mtp is not None, "this model has no multi-token prediction"
        self.spec = spec.mtp
        self.num_layers = 1 if spec.mtp.repeated_layer else spec.mtp.num_layers
        layers = {str(d): MTPLayer(spec, d, f"mtp.layers.{d}", ctx, kernels, keeping) for d in range(self.num_layers)}
        self.layers = nn.ModuleDict(layers)

    def forward(self, hidden_SBH: Tensor, batch: MicroBatch, embedding: Embedding) -> Iterator[Ahead]:
        """Yields one `Ahead` per depth, so that the loss of one depth can be taken before the next is run."""
        for depth, target in zip(self._depths(batch), targets(batch, self.spec.num_layers), strict=True):
            inputs, ((_, twice),) = self._inputs(hidden_SBH, depth, embedding), self.keeping.layers(1, ahead=True)
            hidden_SBH = (
                self.keeping.again(depth.layer, *inputs, meta=depth.meta) if twice else depth.layer(*inputs, depth.meta)
            )
            yield Ahead(hidden_SBH, *target)

    def steps(self, batch: MicroBatch, embedding: Embedding, position: int) -> Iterator[Step]:
        """The same for a schedule, whose steps take and leave the hidden states of all depths so far, the model's own
        first; `position` of the first layer among the chunk's. Ends with the norm of the last depth."""
        for number, depth in enumerate(self._depths(batch)):
            first, *between, last = depth.layer.transformer_layer.steps(position + number, depth.meta)
            yield replace(first, run=partial(self._first, first, depth, embedding))
            yield from (replace(step, run=partial(_beside, step)) for step in between)
            yield replace(last, run=partial(_last, last, depth))

    def _first(self, step: Step, depth: "_Depth", embedding: Embedding, so_far: tuple[Tensor, ...]) -> "_Deeper":
        return _Deeper(so_far, step.run(depth.layer.join(*self._inputs(so_far[-1], depth, embedding))))

    def _inputs(self, hidden_SBH: Tensor, depth: "_Depth", embedding: Embedding) -> tuple[Tensor, Tensor]:
        """What the layer of a depth takes, from the hidden state of the depth before."""
        embedded_SBH = embedding(depth.tokens_BS, depth.positions_BS, depth.meta)
        if not self.spec.detach_heads:
            return hidden_SBH, embedded_SBH
        return hidden_SBH.detach() if depth.is_first else hidden_SBH, embedded_SBH.detach()

    def _depths(self, batch: MicroBatch) -> Iterator["_Depth"]:
        whole = batch.whole or batch
        segments_BS, take = whole.meta.segments_BS, batch.meta.take
        tokens_BS, positions_BS, valid_BS = whole.tokens_BS, whole.meta.positions_BS, whole.meta.valid_BS
        for number in range(self.spec.num_layers):
            tokens_BS, positions_BS = shift(tokens_BS, segments_BS), shift(positions_BS, segments_BS)
            if valid_BS is not None:
                # A place without a token ahead counts as its own token does, so that an all-true mask equals no mask.
                valid_BS = valid_BS & shift(valid_BS, segments_BS, fill=True)
            meta = self._look_ahead(batch.meta, None if valid_BS is None else take(valid_BS), number)
            layer = self.layers[str(number % self.num_layers)]
            assert isinstance(layer, MTPLayer), f"depth {number} is a {type(layer).__name__}"
            yield _Depth(number == 0, take(tokens_BS), take(positions_BS), meta, layer)

    def _look_ahead(self, meta: TokenMeta, valid_BS: Tensor | None, depth: int) -> TokenMeta:
        """The meta of a depth from that of the model."""
        key = meta.random_key
        return replace(
            meta,
            valid_BS=valid_BS,
            # A repeated layer adds its balancing losses once per depth; together they weigh as one layer's.
            aux_scale=meta.aux_scale / (self.spec.num_layers if self.spec.repeated_layer else 1),
            random_key=None if key is None else (*key, "mtp", depth),
            forced=None,  # drawn for the decoder's layers, which may be replayed; these are computed
        )


@dataclass(frozen=True)
class _Depth:
    """One depth on one microbatch."""

    is_first: bool
    tokens_BS: Tensor
    """Moved left by as many places as the depth counts."""
    positions_BS: Tensor
    meta: TokenMeta
    layer: MTPLayer


@dataclass(frozen=True)
class _Deeper:
    """Between two nodes of a depth: the hidden states of the depths before it, and what its layer has come to."""

    so_far: tuple[Tensor, ...]
    state: Any


def _beside(step: Step, deeper: _Deeper) -> _Deeper:
    return replace(deeper, state=step.run(deeper.state))


def _last(step: Step, depth: _Depth, deeper: _Deeper) -> tuple[Tensor, ...]:
    return *deeper.so_far, depth.layer.final_layernorm(step.run(deeper.state))


def targets(batch: MicroBatch, num_depths: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Labels, weights, and the sum of the weights over the whole sequence, of every depth."""
    whole = batch.whole or batch
    labels_BS, weights_BS = whole.labels_BS, whole.loss_mask_BS
    for _ in range(num_depths):
        labels_BS = shift(labels_BS, whole.meta.segments_BS)
        weights_BS = shift(weights_BS, whole.meta.segments_BS)
        yield batch.meta.take(labels_BS), batch.meta.take(weights_BS), weights_BS.sum()


def shift(x_BS: Tensor, segments_BS: Tensor | None, fill: int = 0) -> Tensor:
    """Moves every document one place to the left; its last place gets `fill`."""
    last = torch.full_like(x_BS[:, :1], fill)
    moved_BS = torch.cat([x_BS[:, 1:], last], dim=1)
    if segments_BS is None:
        return moved_BS
    ends = segments_BS[:, 1:] != segments_BS[:, :-1]
    ends_BS = torch.cat([ends, torch.zeros_like(ends[:, :1])], dim=1)
    return moved_BS.masked_fill(ends_BS, fill)
