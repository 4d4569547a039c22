"""The MoE layer: route -> dispatch -> experts -> combine, plus shared experts."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.keeping import Keeping
from megatron_moe.moe.dispatch.allgather import AllGatherDispatcher
from megatron_moe.moe.dispatch.alltoall import AllToAllDispatcher
from megatron_moe.moe.dispatch.contract import Dispatcher, Routing, Rows
from megatron_moe.moe.dispatch.local import LocalDispatcher
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.latent import latent_projections
from megatron_moe.moe.router import Router
from megatron_moe.moe.shared import SharedExperts
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.linear import Linear
from megatron_moe.specs.moe import MoESpec


@dataclass(frozen=True)
class OverlappedTicket:
    """What the dispatcher has under way or its ticket, and what the shared experts have done so far."""

    inner: Any
    hidden_SBH: Tensor
    act_SBF: Tensor


class MoELayer(nn.Module):
    """A sparse feed-forward block: each token visits a few of many experts.

    For the tokens x_t of a microbatch:

    1. route    The router scores all experts for x_t, chooses K of them, and gives each choice a weight p. Choices
                beyond an expert's capacity are dropped.
    2. dispatch x_t (its latent projection, if there is one) is copied once per choice into rows sorted by expert, and p
                goes with it.
    3. compute  Every expert turns its rows into fc2(p * act(fc1(x))).
    4. combine  The rows of a token are added up: sum over its choices of p * expert(x_t).
    5. post     The latent projection is undone, and the shared experts' output of x_t is added.

    Each is a method, and `forward` calls them in this order, so that a schedule can run them apart. Between dispatch
    and combine all sizes are known to the host. With `spec.shared_overlap` the shared experts work while rows travel:
    their first matrix in step 2, their second in step 4, which then adds their output; a schedule that detaches what
    passes between the steps cannot have it.
    """

    fc1_latent_proj: Linear | None
    fc2_latent_proj: Linear | None
    shared_experts: SharedExperts | None

    def __init__(
        self, spec: MoESpec, layer: int, ctx: ParallelContext, kernels: Kernels, keeping: Keeping | None = None
    ) -> None:
        """`layer` is the global index, under which metrics are reported."""
        super().__init__()
        self.keeping = keeping or Keeping()
        hidden_size = spec.router.hidden_size
        expert_width = spec.latent_size or hidden_size
        assert spec.experts.hidden_size == expert_width, f"experts of width {spec.experts.hidden_size}: {expert_width}"
        assert spec.experts.num_experts == spec.router.num_experts, f"{spec.router.num_experts} experts routed"
        assert not spec.shared_overlap or spec.latent_size is None, "shared experts overlap in no latent layer"
        assert not spec.experts.probs_on_input or spec.router.topk == 1, "probabilities on the input need k = 1"
        replicated = ctx.group("tp").size > 1 and not ctx.spec.sequence_parallel
        assert not replicated, "every token must be on one tensor parallel rank alone: sequence parallelism"
        self.router = Router(spec.router, spec.capacity, layer, ctx, kernels)
        self.experts = Experts(spec.experts, ctx, kernels, self.keeping)
        self.shared_experts = None if spec.shared is None else SharedExperts(spec.shared, ctx, kernels)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if spec.latent_size is not None:
            projections = latent_projections(hidden_size, spec.latent_size, ctx, kernels)
            self.fc1_latent_proj, self.fc2_latent_proj = projections
        self.dispatcher = make_dispatcher(spec, ctx, kernels)
        self.overlapped = spec.shared_overlap and self.shared_experts is not None

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta, given_ids_TK: Tensor | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]. `given_ids_TK` replays a routing (`Routing.chosen_TK`)."""
        routing = self.route(hidden_SBH, meta, given_ids_TK)
        rows, ticket = self.dispatch(hidden_SBH, routing)
        rows = self.compute(rows)
        routed_TH = self.combine(rows, ticket)
        return self.post(hidden_SBH, routed_TH)

    def route(self, hidden_SBH: Tensor, meta: TokenMeta, given_ids_TK: Tensor | None = None) -> Routing:
        """Where each of the T = S * B tokens goes, t = s * B + b."""
        routing: Routing = self.router(hidden_SBH, meta, given_ids_TK)
        return routing

    def tokens(self, hidden_SBH: Tensor) -> Tensor:
        """What travels to the experts: the hidden state, or its latent projection [S, B, L]."""
        return hidden_SBH if self.fc1_latent_proj is None else self.fc1_latent_proj(hidden_SBH)

    def dispatch(self, hidden_SBH: Tensor, routing: Routing) -> tuple[Rows, Any]:
        """Takes tokens to their experts; the ticket is for `combine`. In two halves: `start_dispatch`,
        `finish_dispatch`."""
        return self.finish_dispatch(self.start_dispatch(hidden_SBH, self.tokens(hidden_SBH), routing))

    def start_dispatch(self, hidden_SBH: Tensor, tokens_SBH: Tensor, routing: Routing) -> Any:
        """Sends the tokens off."""
        pending = self.dispatcher.start_dispatch(tokens_SBH.flatten(0, 1), routing)
        if not self.overlapped:
            return pending
        assert self.shared_experts is not None
        return OverlappedTicket(pending, hidden_SBH, self.shared_experts.first(hidden_SBH))

    def finish_dispatch(self, pending: Any) -> tuple[Rows, Any]:
        """Receives the rows of this rank's experts."""
        if not isinstance(pending, OverlappedTicket):
            return self.dispatcher.finish_dispatch(pending)
        rows, ticket = self.dispatcher.finish_dispatch(pending.inner)
        return rows, replace(pending, inner=ticket)

    def compute(self, rows: Rows) -> Rows:
        """Runs the experts."""
        result: Rows = self.experts(rows)
        return result

    def combine(self, rows: Rows, ticket: Any) -> Tensor:
        """[T, H], or [T, L] in a latent space: every token's sum. In two halves: `start_combine`, `finish_combine`."""
        return self.finish_combine(self.start_combine(rows, ticket))

    def start_combine(self, rows: Rows, ticket: Any) -> Any:
        """Sends the rows back."""
        if not isinstance(ticket, OverlappedTicket):
            return self.dispatcher.start_combine(rows, ticket)
        assert self.shared_experts is not None
        pending = self.dispatcher.start_combine(rows, ticket.inner)
        return pending, self.shared_experts.second(ticket.act_SBF, ticket.hidden_SBH)

    def finish_combine(self, pending: Any) -> Tensor:
        """Receives the rows of this rank's tokens and adds them up."""
        if not self.overlapped:
            return self.dispatcher.finish_combine(pending)
        rows, shared_SBH = pending
        return self.dispatcher.finish_combine(rows) + shared_SBH.flatten(0, 1)

    def post(self, hidden_SBH: Tensor, routed_TH: Tensor) -> Tensor:
        """Back to [S, B, H], with the shared experts' output of `hidden_SBH` added if it was not in `combine`."""
        if self.fc2_latent_proj is not None:
            routed_TH = self.fc2_latent_proj(routed_TH)
        routed_SBH = routed_TH.view_as(hidden_SBH)
        if self.shared_experts is None or self.overlapped:
            return routed_SBH
        return routed_SBH + self.keeping.run("shared_experts", self.shared_experts, hidden_SBH)


def make_dispatcher(spec: MoESpec, ctx: ParallelContext, kernels: Kernels) -> Dispatcher[Any]:
    """The dispatcher of the spec. When all experts are on one rank, every kind is the local one."""
    num_experts, num_ranks = spec.experts.num_experts, ctx.group("etp_ep").size
    if num_ranks == 1:
        return LocalDispatcher(kernels)
    match spec.dispatcher:
        case "allgather":
            return AllGatherDispatcher(num_experts, ctx, kernels)
        case "alltoall":
            return AllToAllDispatcher(num_experts, ctx, kernels)
        case kind:
            raise AssertionError(f"dispatcher '{kind}' over {num_ranks} ranks")
