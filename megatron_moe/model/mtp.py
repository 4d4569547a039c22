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

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import MicroBatch, TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.block import make_block
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.norm import Norm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import columns_to_residual
from megatron_moe.precision.linear import Linear
from megatron_moe.specs.model import ModelSpec


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

    def __init__(self, spec: ModelSpec, depth: int, site: str, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.ctx = ctx
        hidden = spec.hidden_size
        self.enorm = Norm(spec.norm, hidden, ctx, kernels)
        self.hnorm = Norm(spec.norm, hidden, ctx, kernels)
        self.eh_proj = Linear(2 * hidden, hidden, ctx, kernels, tp_dim=0)
        layer = len(spec.layers) + depth
        self.transformer_layer = make_block(spec.layers[-1], layer, f"{site}.transformer_layer", ctx, kernels)
        self.final_layernorm = Norm(spec.norm, hidden, ctx, kernels)

    def forward(self, hidden_SBH: Tensor, embedding_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        joined = torch.cat([self.enorm(embedding_SBH), self.hnorm(hidden_SBH)], dim=-1)
        projected_SBH = columns_to_residual(self.eh_proj(joined), self.ctx)
        return self.final_layernorm(self.transformer_layer(projected_SBH, meta))


class MTP(nn.Module):
    """The depths in order; one layer serves them all when it is repeated."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        assert spec.mtp is not None, "this model has no multi-token prediction"
        self.spec = spec.mtp
        self.num_layers = 1 if spec.mtp.repeated_layer else spec.mtp.num_layers
        layers = {str(d): MTPLayer(spec, d, f"mtp.layers.{d}", ctx, kernels) for d in range(self.num_layers)}
        self.layers = nn.ModuleDict(layers)

    def forward(self, hidden_SBH: Tensor, batch: MicroBatch, embedding: Embedding) -> Iterator[Ahead]:
        """Yields one `Ahead` per depth, so that the loss of one depth can be taken before the next is run."""
        spec, whole = self.spec, batch.whole or batch
        segments_BS = whole.meta.segments_BS
        take = batch.meta.take
        if spec.detach_heads:
            hidden_SBH = hidden_SBH.detach()
        positions_BS, valid_BS = whole.meta.positions_BS, whole.meta.valid_BS
        tokens_BS = whole.tokens_BS
        for depth, target in enumerate(targets(batch, spec.num_layers)):
            tokens_BS, positions_BS = shift(tokens_BS, segments_BS), shift(positions_BS, segments_BS)
            if valid_BS is not None:
                # A place without a token ahead counts as its own token does, so that an all-true mask equals no mask.
                valid_BS = valid_BS & shift(valid_BS, segments_BS, fill=True)
            meta = self._look_ahead(batch.meta, None if valid_BS is None else take(valid_BS), depth)
            embedded_SBH = embedding(take(tokens_BS), take(positions_BS), meta)
            if spec.detach_heads:
                embedded_SBH = embedded_SBH.detach()
            hidden_SBH = self.layers[str(depth % self.num_layers)](hidden_SBH, embedded_SBH, meta)
            yield Ahead(hidden_SBH, *target)

    def _look_ahead(self, meta: TokenMeta, valid_BS: Tensor | None, depth: int) -> TokenMeta:
        """The meta of a depth from that of the model."""
        key = meta.random_key
        return replace(
            meta,
            valid_BS=valid_BS,
            # A repeated layer adds its balancing losses once per depth; together they weigh as one layer's.
            aux_scale=meta.aux_scale / (self.spec.num_layers if self.spec.repeated_layer else 1),
            random_key=None if key is None else (*key, "mtp", depth),
        )


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
