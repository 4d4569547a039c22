"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 section 2.2).

Depth d = 1 .. D predicts the token d positions further ahead than the model itself:

  z_d = eh_proj([enorm(embedding(tokens shifted left by d)); hnorm(h_{d-1})])
  h_d = final_layernorm(layer(z_d))

with h_0 the model's hidden state after its final norm; embedding and head are shared with the model. With several
residual streams, z_d has a stream for each stream of the previous layer, without its final norm. Labels and loss
weights are shifted like the tokens, so a position whose label lies beyond the sequence (or its document) has weight 0.
Rotary positions are those of the hidden state; only learned positions are shifted. A context-parallel rank shifts the
whole sequence and then takes its part, because the next token of a position may belong to another rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron_moe.config.model import ModelConfig
from megatron_moe.data.batch import MicroBatch, MicrobatchContext
from megatron_moe.layers.components import FeedForward, new_streams_head
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.node_chain import (
    BoundNodes,
    LayerState,
    Node,
    UnitStore,
    acquire_nodes,
    module_node,
    norm_node,
    parameters_of,
    recompute_nodes,
    run_nodes,
)
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.tensor_parallel import columns_to_residual


class MTPLayer(nn.Module):
    """One depth of multi-token prediction. Its transformer layer has the config `ModelConfig.mtp_layer`."""

    def __init__(self, config: ModelConfig, depth: int, resources: ModelResources) -> None:
        super().__init__()
        ctx, kernels = resources.ctx, resources.kernels
        self.ctx = ctx
        hidden = config.hidden_size
        self.enorm = Norm(config.norm, hidden, ctx, kernels)
        self.hnorm = Norm(config.norm, hidden, ctx, kernels)
        declared = DeclaredParameters(config.mtp_parameters(ctx.config), resources.for_submodule(f"mtp.layers.{depth}"))
        self.eh_proj = declared.linear("eh_proj")
        layer, site = len(config.layers) + depth, f"mtp.layers.{depth}.transformer_layer"
        self.transformer_layer = TransformerLayer(config.mtp_layer, layer, site, resources)
        self.streams_head = new_streams_head(config, resources)
        self.final_layernorm = Norm(config.norm, hidden, ctx, kernels)
        self.num_streams = config.residual.num_streams
        final = norm_node(self.final_layernorm, self.streams_head)
        self.nodes = (
            Node("join", "attention", self._join, parameters_of(self.enorm, self.hnorm, self.eh_proj)),
            *self.transformer_layer.nodes,
            *(() if self.streams_head else (final,)),
        )
        self.final_nodes: tuple[Node, ...] = (final,) if self.streams_head else ()
        """Nodes after `nodes` whose input the next depth reads as well."""

    def forward(self, hidden_SBH: Tensor, embedded_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies `nodes` to the hidden states of this rank, [S, B, H] or n streams [S, B, n H]; returns the same
        shape."""
        return run_nodes(self.nodes, LayerState(hidden_SBH=hidden_SBH, embedded_SBH=embedded_SBH), mb).hidden_SBH

    def _join(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Sets the transformer layer's input to the projection of the normed embedding and hidden state."""
        # The head also reads the hidden state. The view makes the order in which its gradients are summed independent
        # of the order of the nodes.
        hidden_SBH = state.hidden_SBH.view_as(state.hidden_SBH)
        embedded_SBH, (seq, batch, width) = self.enorm(state.embedded_SBH), hidden_SBH.shape
        if self.num_streams > 1:  # each stream is a sequence of the batch
            hidden_SBH = hidden_SBH.view(seq, batch * self.num_streams, -1)
            embedded_SBH = embedded_SBH.repeat_interleave(self.num_streams, dim=1)
        joined = self.eh_proj(torch.cat([embedded_SBH, self.hnorm(hidden_SBH)], dim=-1))
        joined_SBH = columns_to_residual(joined, self.ctx)
        return state.evolve(hidden_SBH=joined_SBH.view(seq, batch, width), embedded_SBH=None)


class MTP(nn.Module):
    """All depths of multi-token prediction. With `repeated_layer`, they share one set of weights."""

    def __init__(self, config: ModelConfig, resources: ModelResources) -> None:
        super().__init__()
        saved_tensors = resources.saved_tensors
        assert config.mtp is not None, "the model config has no multi-token prediction"
        self.config = config.mtp
        self._first = len(config.layers)
        self.num_layers = 1 if config.mtp.repeated_layer else config.mtp.num_layers
        self.by_index = [MTPLayer(config, index, resources) for index in range(self.num_layers)]
        """Layers in order of depth. `layers` contains the same modules under string keys."""
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(self.by_index)})
        if config.mtp.repeated_layer:
            for parameter in self.parameters():
                cast(Parameter, parameter).uses *= config.mtp.num_layers
        self._store: UnitStore | None = None
        inputs, ((_, recomputed),) = ("hidden_SBH", "embedded_SBH"), saved_tensors.recompute_groups(1, ahead=True)
        self._layer_nodes = [module_node(layer, inputs) for layer in self.by_index]
        if recomputed:
            self._layer_nodes = [
                recompute_nodes([node], saved_tensors, "chunk", inputs=inputs) for node in self._layer_nodes
            ]

    def acquire_from(self, store: UnitStore) -> None:
        """Makes every node acquire its parameters from `store` before it runs."""
        self._store = store
        for layer in self.by_index:
            layer.nodes = acquire_nodes(layer.nodes, store)
            layer.final_nodes = acquire_nodes(layer.final_nodes, store)

    def bound_nodes(
        self, batch: MicroBatch, embedding: Embedding, first: int, *, by_node: bool
    ) -> Iterator[BoundNodes]:
        """Yields the nodes of every depth. Every depth appends its input hidden state to `LayerState.earlier`.

        `first`: number of decoder layers in the chunk, which is the layer index of the first depth. `by_node`: True
        yields every node of a layer. False yields one node per layer; full recompute requires False.
        """
        for number, depth in enumerate(self._depths(batch)):
            embed = Node("embedding", "attention", partial(self._embed, depth, embedding), parameters_of(embedding))
            index = number % self.num_layers
            layer = self.by_index[index]
            nodes = layer.nodes if by_node else [self._layer_nodes[index]]
            yield BoundNodes(
                [*acquire_nodes([embed], self._store), *nodes, *layer.final_nodes], depth.mb, first + number
            )

    def feed_forwards(self, mb: MicrobatchContext) -> list[tuple[int, FeedForward | None, MicrobatchContext]]:
        """Returns (layer index; feed-forward module, None if the layer has none; context) of every depth. Each depth
        counts as a layer after those of the decoder."""
        modules = [self.by_index[number % self.num_layers] for number in range(self.config.num_layers)]
        return [
            (self._first + number, module.transformer_layer.mlp, self._depth_context(mb, None, number))
            for number, module in enumerate(modules)
        ]

    def _embed(self, depth: "_Depth", embedding: Embedding, state: LayerState, mb: MicrobatchContext) -> LayerState:
        hidden_SBH, embedded_SBH = state.hidden_SBH, embedding(depth.tokens_BS, depth.positions_BS, mb)
        if self.config.detach_heads:
            embedded_SBH = embedded_SBH.detach()
        inner = hidden_SBH if state.streams is None else state.streams
        inner = inner.detach() if self.config.detach_heads and depth.is_first else inner
        return LayerState(hidden_SBH=inner, embedded_SBH=embedded_SBH, earlier=(*state.earlier, hidden_SBH))

    def _depths(self, batch: MicroBatch) -> Iterator["_Depth"]:
        whole = batch.whole or batch
        meta, select = whole.context.tokens, batch.context.tokens.select
        tokens_BS, segments_BS = whole.tokens_BS, meta.segments_BS
        positions_BS, valid_BS = meta.positions_BS, meta.valid_BS
        for number in range(self.config.num_layers):
            tokens_BS, positions_BS = shift_left(tokens_BS, segments_BS), shift_left(positions_BS, segments_BS)
            if valid_BS is not None:
                # A position without a later token keeps its own validity, so that an all-true mask equals no mask.
                valid_BS = valid_BS & shift_left(valid_BS, segments_BS, fill=True)
            own_BS = select(tokens_BS)
            mb = self._depth_context(batch.context, None if valid_BS is None else select(valid_BS), number)
            if mb.tokens.ids_BS is not None:
                mb = replace(mb, tokens=replace(mb.tokens, ids_BS=own_BS))
            yield _Depth(number == 0, own_BS, select(positions_BS), mb)

    def _depth_context(self, mb: MicrobatchContext, valid_BS: Tensor | None, depth: int) -> MicrobatchContext:
        forced = mb.forced_logits
        if forced is not None and self._first + depth in forced:
            # depths that share a layer have different logits
            forced = {self._first + depth % self.num_layers: forced[self._first + depth]}
        return replace(
            mb,
            tokens=replace(mb.tokens, valid_BS=valid_BS),
            # A repeated layer adds its balancing losses once per depth; scaled, their sum has the weight of one layer.
            aux_loss_scale=mb.aux_loss_scale / (self.config.num_layers if self.config.repeated_layer else 1),
            rng=None if mb.rng is None else mb.rng.with_scope("mtp", depth),
            forced_logits=forced,
            forced_routing=None,
        )


@dataclass(frozen=True)
class _Depth:
    """Inputs of one depth for one microbatch."""

    is_first: bool
    tokens_BS: Tensor
    """Token ids, shifted left by d positions for depth d = 1 .. D."""
    positions_BS: Tensor
    mb: MicrobatchContext


def mtp_targets(batch: MicroBatch, num_depths: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (labels, loss weights, sum of the weights over the whole sequence) for every depth."""
    whole = batch.whole or batch
    labels_BS, weights_BS = whole.labels_BS, whole.loss_mask_BS
    for _ in range(num_depths):
        labels_BS = shift_left(labels_BS, whole.context.tokens.segments_BS)
        weights_BS = shift_left(weights_BS, whole.context.tokens.segments_BS)
        yield batch.context.tokens.select(labels_BS), batch.context.tokens.select(weights_BS), weights_BS.sum()


def shift_left(x_BS: Tensor, segments_BS: Tensor | None, fill: int = 0) -> Tensor:
    """Shifts x left by one position within every document. The last position of a document is set to `fill`."""
    last = torch.full_like(x_BS[:, :1], fill)
    moved_BS = torch.cat([x_BS[:, 1:], last], dim=1)
    if segments_BS is None:
        return moved_BS
    ends = segments_BS[:, 1:] != segments_BS[:, :-1]
    ends_BS = torch.cat([ends, torch.zeros_like(ends[:, :1])], dim=1)
    return moved_BS.masked_fill(ends_BS, fill)
