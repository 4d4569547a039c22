"""GPT model: embedding, transformer layers, final norm, output head, and optionally multi-token prediction.

A rank holds one or more pipeline stages (model chunks) in one module, so that parameters have the same global names in
every layout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.pipeline_layout import StageLayout, even_layout
from megatron_moe.data.batch import MicroBatch, MicrobatchContext
from megatron_moe.kernels.ops import Kernels
from megatron_moe.layers.components import Mixer, new_streams_head
from megatron_moe.layers.node_chain import (
    BoundNodes,
    LayerState,
    Node,
    UnitStore,
    acquire_nodes,
    capture_nodes,
    module_node,
    norm_node,
    parameters_of,
    recompute_nodes,
    run_chain,
    schedule_steps,
)
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.quantized_module import quantizers_by_weight
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.mtp import MTP, mtp_targets
from megatron_moe.model.output_head import Head
from megatron_moe.model.rope import Rotations
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers
from megatron_moe.parallel.sequence_shards import PeerShards
from megatron_moe.parallel.tensor_parallel import gather_from, sequence_part
from megatron_moe.pipeline.overlap import Step
from megatron_moe.precision.quantizer_factory import NO_QUANTIZERS, LinearQuantizers


@dataclass(frozen=True)
class LossOutput:
    """Losses of every token of a microbatch, before they are multiplied by loss weights, in promote(fp32, dtype)."""

    loss_BS: Tensor
    mtp_losses: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    """(loss_BS, weights_BS, sum of the weights over the whole sequence) per depth of multi-token prediction."""


class Decoder(nn.Module):
    """Transformer layers of this rank, named by global index, and the final norm in the last stage."""

    def __init__(self, config: ModelConfig, chunks: Sequence[StageLayout], resources: ModelResources) -> None:
        super().__init__()
        self.chunks = tuple(chunks)
        self.by_index = {
            i: TransformerLayer(config.layers[i], i, f"decoder.layers.{i}", resources)
            for chunk in chunks
            for i in chunk.layers
        }
        """Global layer index -> layer. `layers` contains the same modules under string keys."""
        self.layers = nn.ModuleDict({str(i): layer for i, layer in self.by_index.items()})
        self._layer_nodes = [self._whole_layers(chunk, resources.saved_tensors) for chunk in chunks]
        self.final_layernorm = self.streams_head = None
        self._final_nodes: tuple[Node, ...] = ()
        if any(chunk.final_norm for chunk in chunks):
            self.final_layernorm = Norm(config.norm, config.hidden_size, resources.ctx, resources.kernels)
            self.streams_head = new_streams_head(config, resources)
            self._final_nodes = (norm_node(self.final_layernorm, self.streams_head),)

    @property
    def first_mixer(self) -> Mixer | None:
        """First mixer on this rank; None if its layers have none."""
        return next(filter(None, (layer.self_attention for layer in self.by_index.values())), None)

    def bound_nodes(self, chunk: int, mb: MicrobatchContext, *, by_node: bool) -> list[BoundNodes]:
        """Nodes of one chunk's layers and, in the last stage, of the final norm. `by_node`: True returns every node
        of a layer. False returns one node per layer or recomputed layer group; full recompute requires False."""
        stage, final = self.chunks[chunk], self._final_nodes
        if not by_node:
            return [BoundNodes([*self._layer_nodes[chunk], *(final if stage.final_norm else ())], mb)]
        bound = [BoundNodes(self.by_index[i].nodes, mb, position) for position, i in enumerate(stage.layers)]
        if stage.final_norm:
            bound[-1] = bound[-1]._replace(nodes=(*bound[-1].nodes, *final))
        return bound

    def acquire_from(self, store: UnitStore) -> None:
        """Makes every node acquire its parameters from `store` before it runs."""
        for layer in self.by_index.values():
            layer.nodes = acquire_nodes(layer.nodes, store)
        self._final_nodes = acquire_nodes(self._final_nodes, store)

    def _whole_layers(self, stage: StageLayout, saved_tensors: SavedTensorPolicy) -> list[Node]:
        """One node per layer, or per group of layers that are recomputed together."""
        layers, nodes = iter(stage.layers), []
        for number, recomputed in saved_tensors.recompute_groups(len(stage.layers)):
            group = [module_node(self.by_index[next(layers)]) for _ in range(number)]
            nodes += [recompute_nodes(group, saved_tensors, "chunk")] if recomputed else group
        return nodes


class GPT(nn.Module):
    """Decoder-only language model, or the model chunks of one pipeline rank.

    1. embed the tokens, or take the hidden state of the previous stage
    2. run the layers
    3. run the layers of multi-token prediction
    4. in the last stage: head and loss per token, for the model and every depth of multi-token prediction

    Args:
        chunks: pipeline stages of this rank; empty means one stage with the whole model.
        saved_tensors: saved-tensor policies; None means no recompute or offload.
        expert_comm, peers, context_peers: see `ModelResources`.
        quantizers: creates the quantizers of the linear layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        chunks: Sequence[StageLayout] = (),
        saved_tensors: SavedTensorPolicy | None = None,
        expert_comm: ExpertComm | None = None,
        quantizers: LinearQuantizers = NO_QUANTIZERS,
        peers: PeerShards | None = None,
        context_peers: ContextPeers = NO_PEERS,
    ) -> None:
        super().__init__()
        self.saved_tensors = saved_tensors or SavedTensorPolicy()
        self.expert_comm = expert_comm
        self.blocks_host = expert_comm is not None and expert_comm.kind.host_reads > 0
        """Whether exchanges of tokens block the host."""
        shared = expert_comm, quantizers, peers, context_peers
        resources = ModelResources(ctx, kernels, self.saved_tensors, *shared)
        self.config = config
        self.ctx = ctx
        self.chunks = tuple(chunks) or even_layout(len(config.layers), num_mtp=config.num_mtp).stages
        has_loss = any(chunk.loss for chunk in self.chunks)
        has_mtp = any(chunk.num_mtp for chunk in self.chunks)
        # Tied heads and multi-token prediction also read the embedding.
        if any(chunk.embedding for chunk in self.chunks) or has_mtp or has_loss and config.tied_embeddings:
            self.embedding = Embedding(config, ctx, kernels)
        self.decoder = Decoder(config, self.chunks, resources)
        self.mtp = MTP(config, resources) if has_mtp else None
        of_head = quantizers.new_quantizer("head", "output_layer")
        self.output_layer = Head(config, ctx, kernels, of_head) if has_loss else None
        mixers = [config.layers[i].mixer for chunk in self.chunks for i in chunk.layers]
        self.rotations = Rotations(mixers + ([config.mtp_layer.mixer] if has_mtp else []), ctx)
        self._reads_ids = any(moe.router.hash_vocab_size is not None for moe in config.moe_configs)
        self._store: UnitStore | None = None
        self._count_uses()

    def forward(self, batch: MicroBatch, received: Tensor | None = None, *, chunk: int = 0) -> LossOutput | Tensor:
        """Runs one stage. Returns the losses (last stage) or the tensor to send to the next stage.

        Stages send the residual stream [S, B, H], or n streams [S, B, n H]; a stage with MTP layers sends the hidden
        states of all depths, [(1 + D) S, B, H]. `received` is None in the first stage. Multi-token prediction is
        skipped in evaluation.
        """
        return run_chain(self._chain(batch, chunk, by_node=False), received)

    def steps(self, batch: MicroBatch, chunk: int = 0) -> list[Step]:
        """Divides `forward` of one stage into steps that a schedule can interleave with another microbatch's backward.
        The first step takes the argument `received` of `forward`. The last step returns the result of `forward`.
        Exchanges that block the host are separate steps."""
        return schedule_steps(self._chain(batch, chunk, by_node=True), exchange_steps=self.blocks_host)

    def logits(self, tokens_BS: Tensor, mb: MicrobatchContext) -> Tensor:
        """Logits of every position over the padded vocabulary, [S, B, V]. Last stage only."""
        mb = self._with_tables(mb, tokens_BS)
        chain = self._hidden_states(tokens_BS, mb, len(self.chunks) - 1, by_node=False)
        head = self._head_node(lambda state, mb: self._head(state.hidden_SBH, self._tied_VH))
        logits_SBV = run_chain([*chain, BoundNodes(head, mb)], None)
        # collective over tp: all-gather of S * B * V elements, backward this rank's part of the vocabulary
        return gather_from(logits_SBV, self.ctx.group("tp"), dim=-1)

    def acquire_from(self, store: UnitStore) -> None:
        """Makes every node acquire its parameters from `store` before it runs; `state_dict` acquires all parameters."""
        self._store = store
        self.decoder.acquire_from(store)
        if self.mtp is not None:
            self.mtp.acquire_from(store)
        self.register_state_dict_pre_hook(lambda *_: store.wait_for_pending())

    def capture(self, modules: Iterable[str]) -> None:
        """Makes the decoder layers run `modules` (keys of `CAPTURED_NODES`) as CUDA graphs. The layers of multi-token
        prediction are not captured."""
        wanted, quantizers = frozenset(modules), quantizers_by_weight(self)
        if self.ctx.group("etp_ep").size > 1:
            wanted -= {"moe_preprocess"}  # its graph would end between the two autograd functions of the exchange
        for layer in self.decoder.by_index.values():
            layer.nodes = capture_nodes(
                layer.nodes, sorted(wanted), layer.site, quantizers, self.saved_tensors.after_replay
            )

    def draw_forced_logits(self, batch: MicroBatch, dtype: torch.dtype) -> MicroBatch:
        """Draws the random logits of routers with a forced load and adds them to the microbatch, because CUDA graphs
        cannot draw random numbers in a replay."""
        sites = [(i, layer.mlp, batch.context) for i, layer in self.decoder.by_index.items()]
        if self.mtp is not None:
            sites += self.mtp.feed_forwards(batch.context)
        num_tokens = batch.tokens_BS.numel() // sequence_part(self.ctx)[1]
        found = (
            (index, module.draw_logits(num_tokens, dtype, mb)) for index, module, mb in sites if module is not None
        )
        drawn = {index: logits_TE for index, logits_TE in found if logits_TE is not None}
        return replace(batch, context=replace(batch.context, forced_logits=drawn)) if drawn else batch

    def _chain(self, batch: MicroBatch, chunk: int, *, by_node: bool) -> list[BoundNodes]:
        """All nodes of one stage; the last one returns the result of `forward`."""
        stage, mb = self.chunks[chunk], self._with_tables(batch.context, batch.tokens_BS)
        batch = replace(batch, context=mb)
        chain = self._hidden_states(batch.tokens_BS, mb, chunk, by_node=by_node)
        if stage.num_mtp and mb.training:
            assert self.mtp is not None, "this rank has no MTP layers"
            chain += self.mtp.bound_nodes(batch, self.embedding, len(stage.layers), by_node=by_node)
        last = self._head_node(partial(self._losses, batch)) if stage.loss else (Node("send", "head", self._sent),)
        return [*chain, BoundNodes(last, mb)]

    def _with_tables(self, mb: MicrobatchContext, tokens_BS: Tensor) -> MicrobatchContext:
        """Context with the tables of rotary positions, no selected keys yet, and, if routers read them, token ids."""
        mb = replace(self.rotations.attach(mb), selected_keys={})
        return replace(mb, tokens=replace(mb.tokens, ids_BS=tokens_BS)) if self._reads_ids else mb

    def _head_node(self, run: Callable[[LayerState, MicrobatchContext], Any]) -> tuple[Node, ...]:
        tied = self.embedding.word_embeddings if self.config.tied_embeddings else None
        return acquire_nodes([Node("head", "head", run, parameters_of(self.output_layer, tied))], self._store)

    def _hidden_states(
        self, tokens_BS: Tensor, mb: MicrobatchContext, chunk: int, *, by_node: bool
    ) -> list[BoundNodes]:
        """Nodes from the input of the stage to the hidden state after its layers."""
        parameters = parameters_of(self.embedding if self.chunks[chunk].embedding else None)
        embed = Node("embedding", "embedding", partial(self._first_state, tokens_BS, chunk), parameters)
        first = acquire_nodes([embed], self._store)
        return [BoundNodes(first, mb), *self.decoder.bound_nodes(chunk, mb, by_node=by_node)]

    def _first_state(self, tokens_BS: Tensor, chunk: int, received: Tensor | None, mb: MicrobatchContext) -> LayerState:
        """Returns the state before the stage's first layer, from the embedding or from the tensor of the previous
        stage."""
        stage = self.chunks[chunk]
        assert stage.embedding == (received is None), (
            "the first stage must receive no tensor, and all other stages must receive one"
        )
        num_streams = self.config.residual.num_streams
        if received is None:
            hidden_SBH = self.embedding(tokens_BS, mb.tokens.positions_BS, mb)
            return LayerState(hidden_SBH=hidden_SBH if num_streams == 1 else hidden_SBH.repeat(1, 1, num_streams))
        depths = self.config.mtp.num_layers if self.config.mtp and mb.training and not stage.layers else 0
        if depths and stage.num_mtp and num_streams > 1:
            length = len(received) // (1 + num_streams)
            hidden_SBH, streams = received.split([length, num_streams * length])
            return LayerState(hidden_SBH=hidden_SBH, streams=streams.reshape(*hidden_SBH.shape[:2], -1))
        if not depths or not stage.loss or stage.num_mtp:
            return LayerState(hidden_SBH=received)
        *earlier, hidden_SBH = received.chunk(1 + depths)
        return LayerState(hidden_SBH=hidden_SBH, earlier=tuple(earlier))

    def _losses(self, batch: MicroBatch, state: LayerState, mb: MicrobatchContext) -> LossOutput:
        """Losses of the model and of every depth of multi-token prediction, from the hidden states in `state`."""
        own_SBH, *ahead = *state.earlier, state.hidden_SBH
        detach = self.config.mtp is not None and self.config.mtp.detach_heads
        loss_BS, mtp_losses = self._head(own_SBH, self._tied_VH, labels_BS=batch.labels_BS), []
        for hidden_SBH, (labels_BS, weights_BS, num_tokens) in zip(ahead, mtp_targets(batch, len(ahead)), strict=True):
            ahead_BS = self._head(hidden_SBH, self._tied_VH, labels_BS=labels_BS, detach=detach)
            mtp_losses.append((ahead_BS, weights_BS, num_tokens))
        return LossOutput(loss_BS, tuple(mtp_losses))

    def _sent(self, state: LayerState, mb: MicrobatchContext) -> Tensor:
        """Returns the tensor to send to the next stage: the residual stream or, after the final norm, the hidden states
        of the model and of all depths, concatenated along S. Several residual streams that multi-token prediction reads
        follow the hidden state of the model."""
        parts = [*state.earlier, state.hidden_SBH]
        if state.streams is not None and not state.earlier and self.config.mtp is not None and mb.training:
            parts.append(state.streams.reshape(-1, *state.hidden_SBH.shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else state.hidden_SBH

    def _count_uses(self) -> None:
        """Sets `Parameter.uses` of embedding and head. Tied weights and multi-token prediction can raise it above 1."""
        mtp = self.config.mtp
        depths = mtp.num_layers if mtp is not None and not mtp.detach_heads else 0
        num_head_uses = 1 + depths if self.output_layer is not None else 0
        if self.output_layer is not None and self.output_layer.weight is not None:
            self.output_layer.weight.uses = num_head_uses
        if hasattr(self, "embedding"):
            num_lookups = sum(chunk.embedding + (depths if chunk.num_mtp else 0) for chunk in self.chunks)
            words, positions = self.embedding.word_embeddings, self.embedding.position_embeddings
            words.weight.uses = num_lookups + (num_head_uses if self.config.tied_embeddings else 0)
            if positions is not None:
                positions.weight.uses = num_lookups

    @property
    def _tied_VH(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.config.tied_embeddings else None

    @property
    def _head(self) -> Head:
        assert self.output_layer is not None, "only the last stage has a head"
        return self.output_layer


def training_objective(
    output: LossOutput, batch: MicroBatch, *, mtp: MTPConfig | None, per_token: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Returns the scalar to differentiate for this microbatch, and (sum, count) of each loss to report.

    By default the scalar is the weighted mean loss of the tokens, and the step averages it over microbatches. With
    `per_token` it is the weighted sum, and the step divides it by the number of tokens of the global batch.
    Multi-token prediction adds mean loss * `loss_scaling_factor` / D for each of its D depths; with `per_token`, this
    is multiplied by the microbatch's number of tokens. The mean loss of depth d is recorded as metric "mtp_{d} loss".

    A context-parallel rank computes a mean as (sum over its part of the sequence) / (tokens of the whole sequence). In
    metrics, and without `per_token`, the result is multiplied by the number of ranks over which it is later averaged.
    """
    mask_BS = batch.loss_mask_BS
    total, own_tokens = (output.loss_BS * mask_BS).sum(), mask_BS.sum()
    tokens = own_tokens if batch.whole is None else batch.whole.loss_mask_BS.sum()
    num_parts = 1 if batch.context.tokens.part is None else batch.context.tokens.part.num_parts
    scalar = total if per_token else total / tokens.clamp(min=1) * num_parts
    if mtp is not None:
        for depth, (loss_BS, weights_BS, num_ahead) in enumerate(output.mtp_losses, start=1):
            mean = (loss_BS * weights_BS).sum() / num_ahead.clamp(min=1)
            share = mtp.loss_scaling_factor / mtp.num_layers
            scalar = scalar + share * (mean * (tokens if per_token else num_parts))
            if batch.context.metrics is not None:
                batch.context.metrics.record(f"mtp_{depth} loss", mean * num_parts)
    return scalar, {"lm loss": (total.detach(), own_tokens.detach())}
