"""Flex dispatcher: sends each token once to every rank that holds at least one of its experts.

Dispatch sends tokens, expert ids and probabilities; each rank sorts the choices of its local experts and copies the
tokens to rows. Combine sums the rows of every token on the experts' rank, sends one partial sum per token and rank in
the dtype of the tokens, and the token's rank adds these in promote(fp32, dtype). The gradient of combine is sent as in
dispatch, and the gradient of dispatch as in combine. All shapes are static and the host never synchronises with the
device, so exchanges can be captured in CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.kernels.ops import RowIndex, most_rows
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, Routing, first_rows

Work = Any
"""An exchange between its start and its finish."""


@dataclass(frozen=True)
class ExchangeRoute:
    """Choices of this rank's tokens, as the transport needs them for all four exchanges of a layer."""

    ids_TK: Tensor
    """Global expert ids; -1: none."""
    state: Any
    """State of the transport for this routing."""


class ReceivedTokens(NamedTuple):
    """Tokens of all ranks, G at most, as they arrived."""

    tokens_GH: Tensor
    ids_GK: Tensor | None
    """int64 local expert ids, -1 elsewhere; None: the exchange was one of gradients."""
    probs_GK: Tensor | None


class Transport(Protocol):
    """Exchange of tokens between the ranks of etp x ep. One object serves all layers."""

    def new_route(self, ids_TK: Tensor) -> ExchangeRoute:
        """Prepares the exchanges of a routing."""
        ...

    def start_tokens(self, tokens_TH: Tensor, route: ExchangeRoute, probs_TK: Tensor | None) -> Work:
        """Starts to send tokens to the ranks of their experts, with ids and probabilities; None: gradients of combine,
        which go the same way."""
        ...

    def finish_tokens(self, work: Work) -> ReceivedTokens:
        """Makes the current stream wait for the tokens, which are valid until `release`."""
        ...

    def start_sums(self, rows_RH: Tensor, index: RowIndex, route: ExchangeRoute, grad_GK: Tensor | None) -> Work:
        """Sums the rows of each received token and starts to send the sums to the tokens' ranks. `grad_GK`: gradients
        of the received probabilities, which are sent along."""
        ...

    def finish_sums(self, work: Work, route: ExchangeRoute) -> tuple[Tensor, Tensor | None]:
        """(sum of the partial sums of all ranks [T, H], gradients of the probabilities [T, K])."""
        ...

    def missing_rank(self) -> int | None:
        """Global rank that did not send within the timeout; None: all did so far, or it is not known. Does not
        synchronise with the device."""
        ...

    def release(self, work: Work) -> None:
        """Ends the use of what was received, after the reads queued so far on the current stream."""
        ...


@dataclass(frozen=True)
class FlexHandle:
    """State of a dispatch for combine and for the gradients of both."""

    route: ExchangeRoute
    index: RowIndex
    """Rows of this rank's experts; tokens count over those received."""


class _Pending:
    """An exchange in progress; after the forward, its gradient's exchange."""

    anchor: Any
    """Empty tensor that connects the graphs of both halves."""

    def __init__(self, dispatcher: "FlexDispatcher") -> None:
        self.dispatcher, self.transport = dispatcher, dispatcher.transport
        self._work: Work = None

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Applies `change` to the tensor that connects the graphs of both halves."""
        self.anchor = change(self.anchor)

    def started(self, work: Work) -> None:
        """Keeps the work of a started exchange."""
        assert self._work is None, "an exchange is already in progress"
        self._work = work

    def take_work(self) -> Work:
        """The work of the exchange to finish."""
        work, self._work = self._work, None
        assert work is not None, "no exchange is in progress"
        return work

    def take_anchor(self) -> Tensor:
        anchor, self.anchor = self.anchor, None
        assert isinstance(anchor, Tensor), f"finished with {anchor} in place of the boundary tensor"
        return anchor


class PendingDispatch(_Pending):
    """A dispatch in progress; in the backward, the exchange of the gradients of tokens and probabilities."""

    def __init__(self, dispatcher: "FlexDispatcher", tokens_TH: Tensor, routing: Routing) -> None:
        super().__init__(dispatcher)
        assert routing.ids_TK is not None and routing.probs_TK is not None, "a dense routing needs another dispatcher"
        self.route = self.transport.new_route(routing.ids_TK)
        self.capacity, self.probs_dtype = routing.capacity, routing.probs_TK.dtype
        self.handle: FlexHandle | None = None
        self.needed_rows: Tensor | None = None
        self.anchor = _StartDispatch.apply(tokens_TH, routing.probs_TK, self)  # type: ignore[no-untyped-call]


class PendingCombine(_Pending):
    """A combine in progress; in the backward, the exchange of the gradient of its result."""

    def __init__(self, dispatcher: "FlexDispatcher", rows_RH: Tensor, handle: FlexHandle) -> None:
        super().__init__(dispatcher)
        self.handle = handle
        self.anchor = _StartCombine.apply(rows_RH, self)  # type: ignore[no-untyped-call]


class FlexDispatcher:
    """Dispatches without host synchronisation. The number of rows of a rank is bounded by
    `ExpertComm.row_capacity_factor` times T * K, and by what no routing exceeds; more rows are counted as overflow. All
    ranks must have equally many tokens. Rows are sorted by expert, then by source in the order of the etp x ep group,
    then by token."""

    host_reads = 0
    can_overflow = True

    def __init__(self, num_experts: int, comm: ExpertComm, transport: Transport) -> None:
        self.comm, self.kernels, self.transport = comm, comm.kernels, transport
        self.num_ranks = comm.etp_ep.size
        self.num_local = num_experts // comm.ep.size

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingDispatch:
        """Starts to send tokens, ids and probabilities."""
        return PendingDispatch(self, tokens_TH, routing)

    def finish_dispatch(self, pending: PendingDispatch) -> tuple[DispatchedTokens, FlexHandle]:
        """Waits for the tokens of all ranks and copies them to the rows of this rank's experts."""
        rows_RH, probs_GK = _FinishDispatch.apply(pending.take_anchor(), pending)  # type: ignore[no-untyped-call]
        assert pending.handle is not None
        index, needed = pending.handle.index, pending.needed_rows
        rows = DispatchedTokens(
            data=rows_RH,
            probs_R=self.kernels.gather_probs(probs_GK, index),
            offsets_e=index.offsets_E,
            bound=len(index.token_R),
            overflow=None if needed is None else (needed - len(index.token_R)).clamp_min(0),
        )
        return rows, pending.handle

    def start_combine(self, rows: DispatchedTokens, handle: FlexHandle) -> PendingCombine:
        """Sums the rows of every token and starts to send the sums."""
        return PendingCombine(self, rows.data, handle)

    def finish_combine(self, pending: PendingCombine) -> Tensor:
        """[T, H]: the sum of every token's partial sums."""
        out_TH: Tensor = _FinishCombine.apply(pending.take_anchor(), pending)  # type: ignore[no-untyped-call]
        return out_TH

    def sort(self, ids_GK: Tensor, capacity_per_rank: int | None) -> tuple[RowIndex, Tensor | None]:
        """Rows of the local experts among the received choices, and the number of rows needed (int32 scalar on the
        device) if it may exceed the bound."""
        capacity = None if capacity_per_rank is None else capacity_per_rank * self.num_ranks
        align = self.comm.row_alignment
        index = self.kernels.sort_rows(ids_GK, self.num_local, capacity, align)
        if capacity is not None:
            return index, None
        bound = most_rows(len(ids_GK) * min(ids_GK.shape[1], self.num_local), self.num_local, align)
        factor = self.comm.row_capacity_factor
        even_share = ids_GK.numel() / self.comm.ep.size
        if factor is None or factor * even_share >= bound:
            return first_rows(index, bound), None
        bound = most_rows(int(factor * even_share), self.num_local, align)
        assert index.rows_TK is not None
        bounded = replace(
            first_rows(index, bound),
            rows_TK=index.rows_TK.masked_fill(index.rows_TK >= bound, -1),
            offsets_E=index.offsets_E.clamp_max(bound),
        )
        return bounded, index.offsets_E[-1]


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, probs_TK: Tensor, pending: PendingDispatch) -> Tensor:
        ctx.pending = pending
        # etp x ep: a row of H elements per token and rank that holds one of its experts, and T * K ids and
        # probabilities to every rank
        pending.started(pending.transport.start_tokens(tokens_TH, pending.route, probs_TK))
        return tokens_TH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingDispatch = ctx.pending
        work = pending.take_work()
        grad_TH, grad_TK = pending.transport.finish_sums(work, pending.route)
        pending.transport.release(work)
        assert grad_TK is not None
        return grad_TH, grad_TK.to(pending.probs_dtype), None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: PendingDispatch) -> tuple[Tensor, Tensor]:
        ctx.pending, dispatcher = pending, pending.dispatcher
        work = pending.take_work()
        tokens_GH, ids_GK, probs_GK = pending.transport.finish_tokens(work)
        assert ids_GK is not None and probs_GK is not None
        index, pending.needed_rows = dispatcher.sort(ids_GK, pending.capacity)
        rows_RH = dispatcher.kernels.permute(tokens_GH, index)
        probs_GK = probs_GK.to(pending.probs_dtype, copy=True)
        pending.transport.release(work)
        pending.handle = FlexHandle(pending.route, index)
        return rows_RH, probs_GK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingDispatch = ctx.pending
        (grad_RH, grad_GK), handle = grads, pending.handle
        assert handle is not None
        # etp x ep: a row of H elements per token of another rank that has rows here, and G * K gradients
        pending.started(pending.transport.start_sums(grad_RH, handle.index, handle.route, grad_GK))
        return grad_RH.new_empty(0), None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, pending: PendingCombine) -> Tensor:
        ctx.pending, handle = pending, pending.handle
        # etp x ep: a row of H elements per token of another rank that has rows here
        pending.started(pending.transport.start_sums(rows_RH, handle.index, handle.route, None))
        return rows_RH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingCombine = ctx.pending
        work = pending.take_work()
        tokens_GH = pending.transport.finish_tokens(work).tokens_GH
        grad_RH = pending.dispatcher.kernels.permute(tokens_GH, pending.handle.index)
        pending.transport.release(work)
        return grad_RH, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: PendingCombine) -> Tensor:
        ctx.pending = pending
        work = pending.take_work()
        out_TH, _ = pending.transport.finish_sums(work, pending.handle.route)
        pending.transport.release(work)
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingCombine = ctx.pending
        # etp x ep: a row of H elements per token and rank that holds one of its experts
        pending.started(pending.transport.start_tokens(grads[0], pending.handle.route, None))
        return grads[0].new_empty(0), None
