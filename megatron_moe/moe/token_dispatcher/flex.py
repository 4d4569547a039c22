"""Flex dispatcher: sends each token once to every rank that holds at least one of its experts.

Dispatch sends tokens, expert ids and probabilities; each rank sorts the choices of its local experts and copies the
tokens to rows. Combine sums the rows of every token on the experts' rank, sends one partial sum per token and rank in
the dtype of the tokens, and the token's rank adds these in promote(fp32, dtype). The gradient of combine is sent as in
dispatch, and the gradient of dispatch as in combine. All shapes are static and the host never synchronises with the
device, so exchanges can be captured in CUDA graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import Kernels, MatrixOperand, RowIndex, most_rows
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    DispatchedTokens,
    ExpertComm,
    LateRank,
    Routing,
    RowFormats,
    first_rows,
)
from megatron_moe.precision.carried_copies import QuantizedGrad
from megatron_moe.precision.quantized_tensor import QuantizedTensor

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

    tokens_GH: MatrixOperand
    """In the format in which they were sent."""
    ids_GK: Tensor | None
    """Local expert ids, int64; -1 for experts of other ranks. None in exchanges of gradients."""
    probs_GK: Tensor | None
    num_rows: int | None = None
    """Number of rows of this rank's experts; None: the host does not know it."""


class Transport(Protocol):
    """Exchange of tokens between the ranks of etp x ep. One object serves all layers."""

    def new_route(self, ids_TK: Tensor) -> ExchangeRoute:
        """Prepares the exchanges of a routing."""
        ...

    def start_tokens(
        self, tokens_TH: Tensor, route: ExchangeRoute, probs_TK: Tensor | None, form: OperandFormat | None
    ) -> Work:
        """Starts to send tokens to the ranks of their experts, with ids and probabilities; None: gradients of combine,
        which go the same way. `form`: FP8 format in which tokens are sent; None: their dtype."""
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

    def late_rank(self) -> LateRank | None:
        """Rank that did not send within the timeout; None: all did so far, or it is not known. Does not synchronise
        with the device."""
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


class Pending(ABC):
    """An exchange in progress; after the forward, its gradient's exchange. `exchange` starts and `received`
    finishes it."""

    def __init__(self, comm: ExpertComm) -> None:
        self.comm = comm
        self._anchor: Any = None
        """Empty tensor that connects the graphs of both halves."""
        self._work: Work = None

    @abstractmethod
    def start(self, *inputs: Tensor) -> Work:
        """Starts to send the inputs."""

    @abstractmethod
    def finish(self, work: Work) -> Any:
        """Returns what was received: a tensor or a tuple of tensors."""

    @abstractmethod
    def start_backward(self, *grads: Tensor) -> Work:
        """Starts to send the gradients of what was received."""

    @abstractmethod
    def finish_backward(self, work: Work) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs."""

    def exchange(self, *inputs: Tensor) -> None:
        """Starts the exchange."""
        self._anchor = _StartExchange.apply(self, *inputs)  # type: ignore[no-untyped-call]

    def received(self) -> Any:
        """Finishes the exchange and returns what was received."""
        anchor, self._anchor = self._anchor, None
        assert isinstance(anchor, Tensor), f"finished with {anchor} in place of the boundary tensor"
        return _FinishExchange.apply(anchor, self)  # type: ignore[no-untyped-call]

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Applies `change` to the tensor that connects the graphs of both halves."""
        self._anchor = change(self._anchor)

    def started(self, work: Work) -> None:
        """Keeps the work of a started exchange."""
        assert self._work is None, "an exchange is already in progress"
        self._work = work

    def take_work(self) -> Work:
        """The work of the exchange to finish."""
        work, self._work = self._work, None
        assert work is not None, "no exchange is in progress"
        return work


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, *inputs: Tensor) -> Tensor:
        ctx.pending = pending
        pending.started(pending.start(*inputs))
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.comm.overlap_weight_grads()
        return None, *ctx.pending.finish_backward(ctx.pending.take_work())


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: Pending) -> Any:
        ctx.pending = pending
        return pending.finish(pending.take_work())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.started(ctx.pending.start_backward(*grads))
        return grads[0].new_empty(0), None


class PendingDispatch(Pending):
    """A dispatch in progress; in the backward, the exchange of the gradients of tokens and probabilities."""

    def __init__(self, dispatcher: "FlexDispatcher", tokens_TH: Tensor, routing: Routing) -> None:
        super().__init__(dispatcher.comm)
        assert routing.ids_TK is not None and routing.probs_TK is not None, "a dense routing needs another dispatcher"
        self.dispatcher, self.transport = dispatcher, dispatcher.transport
        self.route = self.transport.new_route(routing.ids_TK)
        self.capacity, self.probs_dtype = routing.capacity, routing.probs_TK.dtype
        self.handle: FlexHandle | None = None
        self.needed_rows: Tensor | None = None
        self.quantized: QuantizedTensor | None = None
        self.exchange(tokens_TH, routing.probs_TK)

    def start(self, *inputs: Tensor) -> Work:
        tokens_TH, probs_TK = inputs
        # etp x ep: a row of H elements (and the scales of its blocks) per token and rank that holds one of its experts,
        # and T * K ids and probabilities to every rank
        return self.transport.start_tokens(tokens_TH, self.route, probs_TK, self.dispatcher.formats.tokens)

    def finish(self, work: Work) -> tuple[Tensor, Tensor]:
        tokens_GH, ids_GK, probs_GK, num_rows = self.transport.finish_tokens(work)
        assert ids_GK is not None and probs_GK is not None
        index, self.needed_rows = self.dispatcher.sort(ids_GK, self.capacity, num_rows)
        rows_RH, self.quantized = permuted(self.dispatcher.kernels, tokens_GH, index)
        probs_GK = probs_GK.to(self.probs_dtype, copy=True)
        self.transport.release(work)
        self.handle = FlexHandle(self.route, index)
        return rows_RH, probs_GK

    def start_backward(self, *grads: Tensor) -> Work:
        grad_RH, grad_GK = grads
        assert self.handle is not None
        # etp x ep: a row of H elements per token of another rank that has rows here, and G * K gradients
        return self.transport.start_sums(grad_RH, self.handle.index, self.handle.route, grad_GK)

    def finish_backward(self, work: Work) -> tuple[Tensor | None, ...]:
        grad_TH, grad_TK = self.transport.finish_sums(work, self.route)
        self.transport.release(work)
        assert grad_TK is not None
        return grad_TH, grad_TK.to(self.probs_dtype)


class PendingCombine(Pending):
    """A combine in progress; in the backward, the exchange of the gradient of its result."""

    def __init__(self, dispatcher: "FlexDispatcher", rows_RH: Tensor, handle: FlexHandle) -> None:
        super().__init__(dispatcher.comm)
        self.kernels, self.transport, self.handle = dispatcher.kernels, dispatcher.transport, handle
        self.formats = dispatcher.formats
        self.exchange(rows_RH)

    def start(self, *inputs: Tensor) -> Work:
        # etp x ep: a row of H elements per token of another rank that has rows here
        return self.transport.start_sums(inputs[0], self.handle.index, self.handle.route, None)

    def finish(self, work: Work) -> Tensor:
        out_TH, _ = self.transport.finish_sums(work, self.handle.route)
        self.transport.release(work)
        return out_TH

    def start_backward(self, *grads: Tensor) -> Work:
        # etp x ep: a row of H elements (and the scales of its blocks) per token and rank that holds one of its experts
        return self.transport.start_tokens(grads[0], self.handle.route, None, self.formats.grads)

    def finish_backward(self, work: Work) -> tuple[Tensor | None, ...]:
        tokens_GH = self.transport.finish_tokens(work).tokens_GH
        grad_RH, grad_q = permuted(self.kernels, tokens_GH, self.handle.index)
        self.transport.release(work)
        if grad_q is not None and self.formats.grads is not None:  # for the backward of fc2
            options = grad_RH.shape, grad_RH, self.kernels.dequantize_rows
            grad_RH = QuantizedGrad(grad_q, self.formats.grads, *options)
        return (grad_RH,)


class FlexDispatcher:
    """Dispatches without host synchronisation. The number of rows of a rank is bounded by
    `ExpertComm.row_capacity_factor` times T * K, and by what no routing exceeds; more rows are counted as overflow. All
    ranks must have equally many tokens. Rows are sorted by expert, then by source in the order of the etp x ep group,
    then by token."""

    host_reads = 0
    can_overflow = True
    can_be_captured = False
    can_gather_in_fc1 = False
    sends_fp8 = True

    def __init__(
        self, num_experts: int, comm: ExpertComm, transport: Transport, formats: RowFormats = PLAIN_ROWS
    ) -> None:
        self.comm, self.kernels, self.transport = comm, comm.kernels, transport
        self.num_ranks = comm.etp_ep.size
        self.num_local = num_experts // comm.ep.size
        self.formats = formats

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingDispatch:
        """Starts to send tokens, ids and probabilities."""
        return PendingDispatch(self, tokens_TH, routing)

    def finish_dispatch(self, pending: PendingDispatch) -> tuple[DispatchedTokens, FlexHandle]:
        """Waits for the tokens of all ranks and copies them to the rows of this rank's experts."""
        rows_RH, probs_GK = pending.received()
        assert pending.handle is not None
        index, needed = pending.handle.index, pending.needed_rows
        rows_q, pending.quantized = pending.quantized, None  # the graph refers to `pending` until backward
        rows = DispatchedTokens(
            data=rows_RH,
            probs_R=self.kernels.gather_probs(probs_GK, index),
            offsets_e=index.offsets_E,
            quantized=rows_q,
            bound=len(index.token_R),
            overflow=None if needed is None else (needed - len(index.token_R)).clamp_min(0),
        )
        return rows, pending.handle

    def start_combine(self, rows: DispatchedTokens, handle: FlexHandle) -> PendingCombine:
        """Sums the rows of every token and starts to send the sums."""
        return PendingCombine(self, rows.data, handle)

    def finish_combine(self, pending: PendingCombine) -> Tensor:
        """[T, H]: the sum of every token's partial sums."""
        out_TH: Tensor = pending.received()
        return out_TH

    def sort(
        self, ids_GK: Tensor, capacity_per_rank: int | None, num_rows: int | None
    ) -> tuple[RowIndex, Tensor | None]:
        """Rows of the local experts among the received choices, and the number of rows needed (int32 scalar on the
        device) if it may exceed the bound. `num_rows`: the number of rows without a capacity, if it is known."""
        capacity = None if capacity_per_rank is None else capacity_per_rank * self.num_ranks
        align = self.comm.row_alignment
        index = self.kernels.sort_rows(ids_GK, self.num_local, capacity, align)
        if capacity is not None:
            return index, None
        if num_rows is not None:
            return first_rows(index, most_rows(num_rows, self.num_local, align)), None
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


def permuted(kernels: Kernels, tokens_GH: MatrixOperand, index: RowIndex) -> tuple[Tensor, QuantizedTensor | None]:
    """Copies received tokens to rows: their values, and the rowwise copy if they were sent in FP8."""
    if isinstance(tokens_GH, Tensor):
        return kernels.permute(tokens_GH, index), None
    return kernels.permute_quantized(tokens_GH, index)


def quantized(kernels: Kernels, tokens_TH: Tensor, form: OperandFormat | None) -> MatrixOperand:
    """Rowwise copy of tokens in the FP8 format in which they are sent; the tokens themselves if it is None."""
    if form is None:
        return tokens_TH
    return kernels.quantize_rows(tokens_TH, form, rowwise=True, columnwise=False)
