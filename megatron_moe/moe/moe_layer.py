"""MoE layer: route -> dispatch -> experts -> combine, plus shared experts."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.moe import MoEConfig, RouterConfig
from megatron_moe.config.transport import LOCAL, ExpertTransport
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import Kernels
from megatron_moe.layers.components import FeedForward, Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.linear import Linear, with_shared_fp8_copy
from megatron_moe.layers.node_chain import LayerState, Node, parameters_of, run_nodes
from megatron_moe.layers.resources import ModelResources
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.router import Router
from megatron_moe.moe.shared_experts import SharedExperts
from megatron_moe.moe.token_dispatcher.base import ExpertComm, RowFormats
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.symmetric_memory import has_peer_access

StandInTransport = Callable[[ExpertTransport, RouterConfig], ExpertTransport]
"""Function that returns a replacement for a transport on an emulated rank, whose peers do not exist."""


class MoELayer(FeedForward):
    """Sparse feed-forward module: each token is processed by K of E experts.

    For the tokens x_t of a microbatch:

    1. route    The router scores all experts for x_t, selects K of them, and gives each choice a weight p. Choices
                beyond an expert's capacity are dropped.
    2. dispatch x_t (or its latent projection) and p are copied to one row per choice; rows are sorted by expert.
    3. experts  Every expert computes fc2(p * act(fc1(x))) for its rows.
    4. combine  The rows of a token are summed: sum over its choices of p * expert(x_t).
    5. post     With a latent projection, the sum is projected back to width H. The shared experts' output is added.

    `nodes` is the chain of these steps, with dispatch and combine split into start and finish; `forward` runs it. With
    `config.shared_overlap`, fc1 of the shared experts runs between start and finish of dispatch, and fc2 between start
    and finish of combine.
    """

    fc1_latent_proj: Linear | None
    fc2_latent_proj: Linear | None
    shared_experts: SharedExperts | None

    def __init__(self, config: MoEConfig, site: Site, resources: ModelResources[ExpertComm]) -> None:
        super().__init__()
        ctx, kernels, self.saved_tensors, expert_comm, *_ = resources
        self.router = Router(config.router, config.capacity, site.layer, resources)
        self.experts = Experts(config.experts, resources.for_submodule("experts"))
        self.shared_experts = None
        if config.shared is not None:
            self.shared_experts = SharedExperts(config.shared, resources.for_submodule("shared_experts"))
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if config.latent_size is not None:
            # latent projections: weights [L, H] before dispatch and [H, L] after combine; router and shared experts use
            # width H
            declared = DeclaredParameters.of(config, resources)
            self.fc1_latent_proj = declared.linear("fc1_latent_proj", role="expert_latent", saves_input=True)
            self.fc2_latent_proj = declared.linear("fc2_latent_proj", role="expert_latent")
        self.expert_comm = expert_comm or new_expert_comm(config, ctx, kernels)
        self.dispatcher = self.expert_comm.new_dispatcher(self._row_formats(config))
        self._read_by_dispatch = self.dispatcher.register_weights(self.experts.weights)
        # not if the schedule overlaps microbatches: the other one then runs, on another stream, between the norm and
        # these layers
        if not self.expert_comm.overlaps_microbatches:
            of_shared = None if self.shared_experts is None else self.shared_experts.linear_fc1
            self.input_linears = tuple(each for each in (self.fc1_latent_proj, of_shared) if each is not None)
        self.nodes = self._make_nodes(overlap_shared=config.shared_overlap)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext, forced_ids_TK: Tensor | None = None) -> Tensor:
        """Returns [S, B, H]. `forced_ids_TK`: expert ids to use instead of selecting (`chosen_TK` of a `Routing`)."""
        return run_nodes(self.nodes, LayerState(normed_SBH=hidden_SBH, forced_ids_TK=forced_ids_TK), mb).out_SBH

    def draw_logits(self, num_tokens: int, dtype: torch.dtype, mb: MicrobatchContext) -> Tensor | None:
        return self.router.random_logits(num_tokens, dtype, mb) if self.router.config.forced_routing_flag else None

    def _row_formats(self, config: MoEConfig) -> RowFormats:
        """Selects what the dispatcher delivers: whether fc1 gathers its rows from the tokens, and the FP8 formats in
        which tokens and combine gradients are sent (None if they are sent unquantised)."""
        fc1, fc2 = self.experts.linear_fc1.quantizer, self.experts.linear_fc2.quantizer
        kind, is_alone = self.expert_comm.kind, self.expert_comm.etp_ep.size == 1
        gathers = kind.can_gather_in_fc1 and self.saved_tensors.stash is None and self.experts.has_fused_casts
        # fc1 saves tokens instead of a columnwise copy of rows; on one rank, the router saves the tokens anyway
        gathers = gathers and fc1 is not None and (is_alone or not fc1.weight_grad)
        tokens = grads = None
        if kind.sends_fp8 and config.fp8_dispatch and fc1 is not None and fc1.fused_block:
            assert not config.experts.probs_on_input, (
                "experts quantise tokens multiplied by probabilities, so tokens are not sent in FP8"
            )
            tokens = fc1.formats[0]
        if kind.sends_fp8 and config.fp8_combine_grad and fc2 is not None and fc2.fused_block:
            assert not config.experts.probs_on_output, (
                "experts scale gradients before quantisation, so gradients are not sent in FP8"
            )
            grads = fc2.formats[1]
        return RowFormats(gathers, tokens, grads)

    def _make_nodes(self, *, overlap_shared: bool) -> tuple[Node, ...]:
        shared, in_dispatch, in_combine = self.shared_experts, [], []
        if shared is not None and overlap_shared:
            first, second = parameters_of(shared.linear_fc1), parameters_of(shared.linear_fc2, shared.gate_weight)
            in_dispatch.append(Node("shared_first", "dispatch", self._shared_first, first))
            in_combine.append(Node("shared_second", "combine", self._shared_second, second))
            shared = None
        return (
            Node("router", "attention", self._route, parameters_of(self.router, self.fc1_latent_proj)),
            Node("dispatch_start", "dispatch", self._start_dispatch, self._read_by_dispatch),
            *in_dispatch,
            Node("dispatch_finish", "dispatch", self._finish_dispatch),
            Node("experts", "experts", self._run_experts, parameters_of(self.experts)),
            Node("combine_start", "combine", self._start_combine),
            *in_combine,
            Node("combine_finish", "combine", self._finish_combine),
            Node("post", "post", self._post, parameters_of(self.fc2_latent_proj, shared)),
        )

    def _route(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        normed_SBH = tokens_SBH = state.normed_SBH
        with state.discard:
            routing = self.router(normed_SBH, mb, state.forced_ids_TK)
            if self.fc1_latent_proj is not None:
                if self.shared_experts is not None:
                    normed_SBH = with_shared_fp8_copy(normed_SBH, self.fc1_latent_proj, self.shared_experts.linear_fc1)
                tokens_SBH = self.fc1_latent_proj(normed_SBH)
        return state.evolve(routing=routing, tokens_SBH=tokens_SBH, normed_SBH=normed_SBH, forced_ids_TK=None)

    def _start_dispatch(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        with state.discard:
            pending = self.dispatcher.start_dispatch(state.tokens_SBH.flatten(0, 1), state.routing)
        return state.evolve(pending=pending, routing=None, tokens_SBH=None)

    def _finish_dispatch(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        rows, handle = self.dispatcher.finish_dispatch(state.pending)
        self.expert_comm.record_overflow(rows)
        return state.evolve(rows=rows, dispatch_handle=handle, pending=None)

    def _shared_first(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        assert self.shared_experts is not None
        with state.discard:
            return state.evolve(shared=self.shared_experts.run_fc1(state.normed_SBH))

    def _shared_second(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        assert self.shared_experts is not None
        with state.discard:
            return state.evolve(shared=self.shared_experts.run_fc2(state.shared, state.normed_SBH))

    def _run_experts(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        return state.evolve(rows=self.experts(state.rows))

    def _start_combine(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        pending = self.dispatcher.start_combine(state.rows, state.dispatch_handle)
        return state.evolve(pending=pending, rows=None, dispatch_handle=None)

    def _finish_combine(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        return state.evolve(routed_TH=self.dispatcher.finish_combine(state.pending), pending=None)

    def _post(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        routed_TH, shared_SBH = state.routed_TH, state.shared
        with state.discard:
            if self.fc2_latent_proj is not None:
                routed_TH = self.fc2_latent_proj(routed_TH)
            out_SBH = routed_TH.view_as(state.normed_SBH)
            if self.shared_experts is not None:
                if shared_SBH is None:
                    shared_SBH = self.saved_tensors.run("shared_experts", self.shared_experts, state.normed_SBH)
                out_SBH = out_SBH + shared_SBH
        return state.evolve(out_SBH=out_SBH, normed_SBH=None, routed_TH=None, shared=None)


def new_expert_comm(
    config: MoEConfig,
    ctx: ParallelContext,
    kernels: Kernels,
    *,
    overlaps_microbatches: bool = False,
    stand_in: StandInTransport | None = None,
) -> ExpertComm:
    """Creates the transport of a run, and the communication state of its token dispatchers.

    Args:
        overlaps_microbatches: see `ExpertComm`.
        stand_in: returns a transport that replaces the chosen one if the other ranks do not exist; None if they exist.

    Raises EnvironmentProblem if the transport cannot serve the ranks.
    """
    group = ctx.group("etp_ep")
    on_gpus = stand_in is not None or ctx.device.type != "cpu"
    here = replace(ctx.config, shares_memory=ctx.config.shares_memory and on_gpus)
    choice = config.choose_transport(here, has_peer_access=has_peer_access(group, ctx))
    transport = choice.transport if stand_in is None else stand_in(choice.transport, config.router)
    assert group.size == 1 or transport is not LOCAL, f"unknown dispatcher '{config.dispatcher}' for {group.size} ranks"
    comm = ExpertComm(
        ctx,
        kernels,
        transport,
        config.router.num_experts,
        row_capacity_factor=config.expert_rank_capacity_factor,
        row_alignment=config.row_alignment,
        overlaps_microbatches=overlaps_microbatches,
        options=transport.options(config),
    )
    comm.note = choice.note
    return comm
