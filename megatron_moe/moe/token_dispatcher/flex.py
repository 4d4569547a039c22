"""Flex dispatcher: sends each token once to every rank that holds at least one of its experts.

Dispatch sends tokens, expert ids and probabilities; each rank sorts the choices of its local experts and copies the
tokens to rows. Combine sums the rows of every token on the experts' rank, sends one partial sum per token and rank in
the dtype of the tokens, and the token's rank adds these in promote(fp32, dtype). The gradient of combine is sent as in
dispatch, and the gradient of dispatch as in combine. All shapes are static and the host never synchronises with the
device, so exchanges can be captured in CUDA graphs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.costs import most_rows
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import Kernels, MatrixOperand, RowIndex
from megatron_moe.moe.token_dispatcher.base import (
    DispatchedTokens,
    Dispatcher,
    ExpertComm,
    LateRank,
    Routing,
    RowFormats,
    first_rows,
)
from megatron_moe.parallel.exchange import SplitExchange
from megatron_moe.precision.carried_copies import QuantizedGrad
from megatron_moe.precision.quantized_tensor import QuantizedTensor

Work = Any
"""State of an exchange in progress, which the transport defines."""


@dataclass
class ExchangeState:
    """Choices of this rank's tokens and, once the tokens have arrived, the rows of its experts. It serves all four
    exchanges of a layer: dispatch, combine, and the gradients of both."""

    ids_TK: Tensor
    """Global expert ids of the choices; -1 for no expert."""
    capacity: int | None
    probs_dtype: torch.dtype
    transport_state: Any
    """What the transport stores for this routing, such as its counts of tokens per rank."""
    index: RowIndex | None = None
    """Received token of each row; None before they arrive, or if the transport delivers the rows themselves."""
    offsets_e: Tensor | None = None
    """int32 end of each local expert's rows; None before the tokens arrive."""
    bound: int = 0
    """Number of rows that are allocated."""
    needed_rows: Tensor | None = None
    """int32 scalar on the device: number of rows that the routing needs; None if they cannot exceed `bound`."""

    @classmethod
    def of(cls, routing: Routing, transport_state: Any, ids_TK: Tensor | None = None) -> "ExchangeState":
        """Creates the state before any tokens are sent. `ids_TK`: expert ids to use instead of those of `routing`; None
        means the latter."""
        ids_TK = routing.ids_TK if ids_TK is None else ids_TK
        assert ids_TK is not None, "the flex dispatcher does not support dense routing"
        return cls(ids_TK, routing.capacity, routing.probs.dtype, transport_state)


class ReceivedRows(NamedTuple):
    """Rows of this rank's experts, as a transport delivers them."""

    rows_RH: Tensor
    probs: Tensor | None
    """Probabilities of the received choices [G, K], or of the rows [R] if `ExchangeState.index` is None; None if
    gradients were exchanged."""
    quantized: QuantizedTensor | None = None
    """Rowwise copy of the rows, None unless tokens were sent in FP8."""


class Transport(ABC):
    """Exchange of tokens between the ranks of etp x ep. One object serves all layers."""

    def __init__(self, comm: ExpertComm) -> None:
        self._comm, self._kernels, self._group = comm, comm.kernels, comm.etp_ep
        self._num_local = comm.num_experts // comm.ep.size

    @abstractmethod
    def new_exchange(self, routing: Routing) -> ExchangeState:
        """Creates the state that all exchanges of one routing share: dispatch, combine and their gradients."""

    @abstractmethod
    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> Work:
        """Starts to send tokens [T, H], or the output gradients of combine, to the ranks of their experts.

        `probs_TK`: probabilities to send with the expert ids; None if gradients are sent. `fmt`: FP8 format in which
        tokens or gradients are sent; None means their dtype."""

    @abstractmethod
    def finish_receive_tokens(self, work: Work, exchange: ExchangeState) -> ReceivedRows:
        """Makes the current stream wait for the tokens and returns them as rows. The first call also sets the fields of
        the exchange that describe the rows."""

    @abstractmethod
    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> Work:
        """Sums the rows of each received token and starts to send the sums to the tokens' ranks. `grad_probs`:
        gradients of the probabilities of `ReceivedRows`, which are sent along; None if the rows are outputs."""

    @abstractmethod
    def finish_receive_sums(self, work: Work, exchange: ExchangeState) -> tuple[Tensor, Tensor | None]:
        """Returns (sum of the partial sums of all ranks [T, H], gradients of the probabilities [T, K] or None if none
        were sent)."""

    def late_rank(self) -> LateRank | None:
        """Rank that did not send within the timeout; None if all did so far, or if it is not known. Does not
        synchronise with the device."""
        return None


class ReceivedTokens(NamedTuple):
    """Tokens received from all ranks, [G, ...]. With static shapes, G is the number of slots, some of them unused."""

    tokens_GH: MatrixOperand
    """Received tokens, in the format in which they were sent."""
    ids_GK: Tensor | None
    """Expert ids, int64 or int32; experts of other ranks are ignored. None in exchanges of gradients."""
    probs_GK: Tensor | None
    num_rows: int | None = None
    """Number of rows of this rank's experts; None if the number is only on the device."""
    first_expert: int = 0
    """Id in `ids_GK` of this rank's first expert."""


class TokenTransport(Transport):
    """Transport that delivers each token once per rank. The choices of local experts are sorted here, and the tokens
    copied to rows."""

    @abstractmethod
    def receive_tokens(self, work: Work) -> ReceivedTokens:
        """Makes the current stream wait for the tokens, which are valid until `release`."""

    def release(self, work: Work) -> None:
        """Ends the use of received tokens, after the reads queued so far on the current stream."""

    def finish_receive_tokens(self, work: Work, exchange: ExchangeState) -> ReceivedRows:
        tokens_GH, ids_GK, probs_GK, num_rows, first_expert = self.receive_tokens(work)
        if ids_GK is not None:
            index, exchange.needed_rows = self._sort(ids_GK, first_expert, exchange.capacity, num_rows)
            exchange.index, exchange.offsets_e, exchange.bound = index, index.offsets_E, len(index.token_R)
        assert exchange.index is not None
        rows_RH, rows_q = permute_received(self._kernels, tokens_GH, exchange.index)
        probs_GK = None if probs_GK is None else probs_GK.to(exchange.probs_dtype, copy=True)
        self.release(work)
        return ReceivedRows(rows_RH, probs_GK, rows_q)

    def _sort(
        self, ids_GK: Tensor, first_expert: int, capacity_per_rank: int | None, num_rows: int | None
    ) -> tuple[RowIndex, Tensor | None]:
        """Sorts received choices by local expert, cut to the row bound. Returns the index and the row count before the
        cut, for the overflow flag (int32 scalar on the device), or None if the bound cannot be exceeded. `num_rows`:
        number of rows without a capacity, if it is available on the host."""
        capacity = None if capacity_per_rank is None else capacity_per_rank * self._group.size
        align = self._comm.row_alignment
        index = self._kernels.sort_rows(ids_GK, self._num_local, capacity, align, first_expert)
        if capacity is not None:
            return index, None
        if num_rows is not None:
            return first_rows(index, most_rows(num_rows, self._num_local, align)), None
        bound = most_rows(len(ids_GK) * min(ids_GK.shape[1], self._num_local), self._num_local, align)
        factor = self._comm.row_capacity_factor
        even_share = ids_GK.numel() / self._comm.ep.size
        if factor is None or factor * even_share >= bound:
            return first_rows(index, bound), None
        bound = most_rows(int(factor * even_share), self._num_local, align)
        assert index.rows_TK is not None
        bounded = replace(
            first_rows(index, bound),
            rows_TK=index.rows_TK.masked_fill(index.rows_TK >= bound, -1),
            offsets_E=index.offsets_E.clamp_max(bound),
        )
        return bounded, index.offsets_E[-1]


class DispatchExchange(SplitExchange):
    """Exchange of tokens and probabilities and, in the backward, of their gradients."""

    def __init__(self, comm: ExpertComm, exchange: ExchangeState, formats: RowFormats) -> None:
        super().__init__(comm.overlap_weight_grads)
        self._transport: Transport = comm.transport
        self._format, self.exchange = formats.tokens, exchange
        self.quantized: QuantizedTensor | None = None

    def send(self, *inputs: Tensor) -> Work:
        tokens_TH, probs_TK = inputs
        # collective over etp x ep: a row of H elements (and the scales of its blocks) per token and rank that holds one
        # of its experts, and T * K ids and probabilities to every rank
        return self._transport.start_send_tokens(tokens_TH, self.exchange, probs_TK, self._format)

    def receive(self, work: Work) -> tuple[Tensor, Tensor]:
        rows_RH, probs, self.quantized = self._transport.finish_receive_tokens(work, self.exchange)
        assert probs is not None
        return rows_RH, probs

    def send_grads(self, *grads: Tensor) -> Work:
        grad_RH, grad_probs = grads
        # collective over etp x ep: a row of H elements per token of another rank that has rows here, and G * K
        # gradients
        return self._transport.start_send_sums(grad_RH, self.exchange, grad_probs)

    def receive_grads(self, work: Work) -> tuple[Tensor | None, ...]:
        grad_TH, grad_TK = self._transport.finish_receive_sums(work, self.exchange)
        assert grad_TK is not None
        return grad_TH, grad_TK.to(self.exchange.probs_dtype)


class CombineExchange(SplitExchange):
    """Exchange of the sums of rows and, in the backward, of the gradient of its result."""

    def __init__(self, comm: ExpertComm, exchange: ExchangeState, formats: RowFormats) -> None:
        super().__init__(comm.overlap_weight_grads)
        self._transport: Transport = comm.transport
        self._dequantize, self._format, self._exchange = comm.kernels.dequantize_rows, formats.grads, exchange

    def send(self, *inputs: Tensor) -> Work:
        # collective over etp x ep: a row of H elements per token of another rank that has rows here
        return self._transport.start_send_sums(inputs[0], self._exchange, None)

    def receive(self, work: Work) -> Tensor:
        return self._transport.finish_receive_sums(work, self._exchange)[0]

    def send_grads(self, *grads: Tensor) -> Work:
        # collective over etp x ep: a row of H elements (and the scales of its blocks) per token and rank that holds one
        # of its experts
        return self._transport.start_send_tokens(grads[0], self._exchange, None, self._format)

    def receive_grads(self, work: Work) -> tuple[Tensor | None, ...]:
        grad_RH, _, grad_q = self._transport.finish_receive_tokens(work, self._exchange)
        if grad_q is not None and self._format is not None:
            # the backward of fc2 reads the received FP8 rows, instead of quantising the gradient again
            grad_RH = QuantizedGrad(grad_q, self._format, grad_RH.shape, grad_RH, self._dequantize)
        return (grad_RH,)


class FlexDispatcher(Dispatcher[ExchangeState]):
    """Dispatches through the transport of `ExpertComm`. With bounded rows, all ranks must have the same number of
    tokens, and a rank has at most `ExpertComm.row_capacity_factor` times T * K rows; further rows are counted as
    overflow. Rows are sorted by expert, then, if the transport delivers tokens, by source in the order of the etp x ep
    group, then by token."""

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> DispatchExchange:
        """Starts to send tokens, ids and probabilities."""
        exchange = self.comm.transport.new_exchange(routing)
        return DispatchExchange(self.comm, exchange, self.formats).start(tokens_TH, routing.probs)

    def finish_dispatch(self, pending: DispatchExchange) -> tuple[DispatchedTokens, ExchangeState]:
        """Waits for the tokens of all ranks and copies them to the rows of this rank's experts."""
        rows_RH, probs = pending.finish()
        exchange, needed = pending.exchange, pending.exchange.needed_rows
        # removed from `pending`, because the autograd graph keeps `pending` alive until backward
        rows_q, pending.quantized = pending.quantized, None
        assert exchange.offsets_e is not None
        rows = DispatchedTokens(
            data=rows_RH,
            probs_R=probs if exchange.index is None else self.kernels.gather_probs(probs, exchange.index),
            offsets_e=exchange.offsets_e,
            quantized=rows_q,
            bound=exchange.bound,
            overflow=None if needed is None else (needed - exchange.bound).clamp_min(0),
        )
        return rows, exchange

    def start_combine(self, rows: DispatchedTokens, handle: ExchangeState) -> CombineExchange:
        """Sums the rows of every token and starts to send the sums."""
        return CombineExchange(self.comm, handle, self.formats).start(rows.data)

    def finish_combine(self, pending: CombineExchange) -> Tensor:
        """Returns [T, H]: for each token, the sum of its partial sums from all ranks."""
        return pending.finish()


def permute_received(
    kernels: Kernels, tokens_GH: MatrixOperand, index: RowIndex
) -> tuple[Tensor, QuantizedTensor | None]:
    """Copies received tokens to rows. Returns (values of the rows, rowwise FP8 copy or None if the tokens were not sent
    in FP8)."""
    if isinstance(tokens_GH, Tensor):
        return kernels.permute(tokens_GH, index), None
    return kernels.permute_quantized(tokens_GH, index)


def quantize_tokens(kernels: Kernels, tokens_TH: Tensor, fmt: OperandFormat | None) -> MatrixOperand:
    """Quantises tokens to `fmt`, the FP8 format in which they are sent. Returns the tokens themselves if it is None."""
    if fmt is None:
        return tokens_TH
    return kernels.quantize_rows(tokens_TH, fmt, rowwise=True, columnwise=False)
