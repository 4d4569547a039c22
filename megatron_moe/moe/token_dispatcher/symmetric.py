"""Symmetric-memory dispatcher: pushes every token once to each rank that holds one of its experts, within one host.

Dispatch writes tokens, expert ids and probabilities directly to slots on the other ranks; each rank then sorts the
choices of its own experts and copies the tokens to rows. Combine sums the rows of every token on the experts' rank,
pushes one partial sum per token and rank in the dtype of the tokens, and the token's rank adds these in promote(fp32,
dtype) in the order of the ranks. Gradients take the same way in the other direction. The host reads nothing and all
shapes are static, so the exchanges can be captured in CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.push_channel import ChannelShape, PushChannel, new_channel
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, Routing, first_rows
from megatron_moe.parallel.grid import expert_grid
from megatron_moe.parallel.streams import Event, Streams, make_streams
from megatron_moe.parallel.symmetric_memory import allocate_symmetric

STREAM = "expert exchange"


@dataclass(frozen=True)
class PushResources:
    """Channels, stream and limits that the symmetric-memory dispatchers of all layers share."""

    comm: ExpertComm
    streams: Streams
    channels: dict[tuple[str, ChannelShape], PushChannel] = field(default_factory=dict)
    """By purpose (dispatch or combine, forward or backward) and shape. A schedule that overlaps two microbatches has at
    most one exchange of each purpose in progress."""

    def channel(self, purpose: str, shape: ChannelShape) -> PushChannel:
        """The channel of one purpose. Collective over the expert ranks when the shape is new."""
        if (purpose, shape) not in self.channels:
            ctx, group = self.comm.ctx, self.comm.etp_ep
            self.channels[purpose, shape] = new_channel(
                shape,
                group.rank,
                lambda num_bytes: allocate_symmetric(num_bytes, group, ctx),
                timeout_s=60 * ctx.config.timeout_minutes,
                num_programs=self.comm.num_sms,
            )
        return self.channels[purpose, shape]


class _Exchange:
    """One exchange between its start and its finish: a push, and later the wait, the reads and the acknowledgement."""

    def __init__(self, resources: PushResources, channel: PushChannel, push: Callable[[], None], *keep: Any) -> None:
        """`keep`: tensors that the push reads."""
        self._resources, self._channel, self._keep = resources, channel, keep
        with resources.streams.fork(STREAM):
            push()

    def arrive(self) -> PushChannel:
        """Makes the current stream wait until the slots of all ranks have arrived. `leave` must follow the reads."""
        streams, channel = self._resources.streams, self._channel
        with streams.on(STREAM):
            self._resources.comm.kernels.wait_for_peers(channel)
            arrived: Event = streams.record()
        streams.wait(arrived)
        return channel

    def leave(self) -> None:
        """Acknowledges the slots after the reads queued so far on the current stream."""
        self._resources.comm.kernels.acknowledge(self._channel)
        self._keep = ()


@dataclass(frozen=True)
class SymmetricHandle:
    """State of a dispatch for combine and for the gradients of both."""

    shape: ChannelShape
    ids_TK: Tensor
    ranks_T: Tensor
    """Ranks that every token was sent to, see `Kernels.mark_ranks`."""
    index: RowIndex
    """Rows of this rank's experts; tokens count over the slots of all ranks, [P * T]."""


class PendingDispatch:
    """A dispatch in progress; in the backward, the exchange of the gradients of tokens and probabilities."""

    def __init__(self, dispatcher: "SymmetricDispatcher", tokens_TH: Tensor, routing: Routing) -> None:
        assert routing.ids_TK is not None and routing.probs_TK is not None, "a dense routing needs another dispatcher"
        self.dispatcher, self.ids_TK, self.capacity = dispatcher, routing.ids_TK, routing.capacity
        self.ranks_T = dispatcher.kernels.mark_ranks(self.ids_TK, dispatcher.owner_EP)
        self.probs_dtype = routing.probs_TK.dtype
        self.shape = ChannelShape(
            num_ranks=dispatcher.num_ranks,
            num_tokens=len(tokens_TH),
            width=tokens_TH.shape[1],
            topk=routing.ids_TK.shape[1],
            dtype=tokens_TH.dtype,
        )
        self.exchange: _Exchange | None = None
        self.handle: SymmetricHandle | None = None
        self.needed_rows: Tensor | None = None
        self.anchor: Any = _StartDispatch.apply(tokens_TH, routing.probs_TK, self)  # type: ignore[no-untyped-call]
        """Empty tensor that connects the graphs of both halves."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """(rows [R, H], probabilities [P * T, K]); sets `handle`."""
        anchor, self.anchor = self.anchor, None
        rows_RH, probs_GK = _FinishDispatch.apply(anchor, self)  # type: ignore[no-untyped-call]
        return rows_RH, probs_GK

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Applies `change` to the tensor that connects the graphs of both halves."""
        self.anchor = change(self.anchor)


class PendingCombine:
    """A combine in progress; in the backward, the exchange of the gradient of its result."""

    def __init__(self, dispatcher: "SymmetricDispatcher", rows_RH: Tensor, handle: SymmetricHandle) -> None:
        self.dispatcher, self.handle = dispatcher, handle
        self.shape = replace(handle.shape, dtype=rows_RH.dtype)
        self.exchange: _Exchange | None = None
        self.anchor: Any = _StartCombine.apply(rows_RH, self)  # type: ignore[no-untyped-call]

    def finish(self) -> Tensor:
        """[T, H]."""
        anchor, self.anchor = self.anchor, None
        out_TH: Tensor = _FinishCombine.apply(anchor, self)  # type: ignore[no-untyped-call]
        return out_TH

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Applies `change` to the tensor that connects the graphs of both halves."""
        self.anchor = change(self.anchor)


class SymmetricDispatcher:
    """Dispatches without host synchronisation between ranks that share memory. The number of rows of a rank is bounded
    by `ExpertComm.row_capacity_factor` times T * K, and by what no routing exceeds; more rows set the overflow flag.
    All ranks must have equally many tokens. Rows are sorted by expert, then by source in the order of the etp x ep
    group, then by token."""

    host_reads = 0
    can_overflow = True

    def __init__(self, num_experts: int, comm: ExpertComm) -> None:
        self.comm, self.kernels = comm, comm.kernels
        if comm.push is None:
            comm.push = PushResources(comm, make_streams(comm.ctx.device, STREAM))
        self.resources: PushResources = comm.push
        self.num_ranks = comm.etp_ep.size
        self.num_local = num_experts // comm.ep.size
        self.first = comm.ep.rank * self.num_local
        grid = expert_grid(comm.ctx.config)
        places = [grid.coordinates(rank)["ep"] for rank in comm.etp_ep.ranks]
        self.owner_EP = torch.tensor(
            [[expert // self.num_local == place for place in places] for expert in range(num_experts)],
            device=comm.ctx.device,
        )
        """bool: whether a rank of etp x ep holds an expert, or a part of it."""

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingDispatch:
        """Starts the push of tokens, ids and probabilities."""
        return PendingDispatch(self, tokens_TH, routing)

    def finish_dispatch(self, pending: PendingDispatch) -> tuple[DispatchedTokens, SymmetricHandle]:
        """Waits for all ranks and copies their tokens to the rows of this rank's experts."""
        rows_RH, probs_GK = pending.finish()
        assert pending.handle is not None
        index, needed = pending.handle.index, pending.needed_rows
        probs_R = self.kernels.gather_probs(probs_GK, index)
        rows = DispatchedTokens(
            data=rows_RH,
            probs_R=probs_R,
            offsets_e=index.offsets_E,
            bound=len(index.token_R),
            overflow=None if needed is None else needed > len(index.token_R),
        )
        return rows, pending.handle

    def start_combine(self, rows: DispatchedTokens, handle: SymmetricHandle) -> PendingCombine:
        """Sums the rows of every token and starts the push of the sums."""
        return PendingCombine(self, rows.data, handle)

    def finish_combine(self, pending: PendingCombine) -> Tensor:
        """[T, H]: the sum of every token's partial sums, in the order of the ranks."""
        return pending.finish()

    def sort(self, ids_GK: Tensor, capacity_per_rank: int | None) -> tuple[RowIndex, Tensor | None]:
        """Rows of the local experts among the choices [P * T, K] of all ranks, and the number of rows needed (int32
        scalar on the device) if it may exceed the bound."""
        capacity = None if capacity_per_rank is None else capacity_per_rank * self.num_ranks
        local_GK = ids_GK.long() - self.first
        local_GK = local_GK.masked_fill((local_GK < 0) | (local_GK >= self.num_local), -1)
        index = self.kernels.sort_rows(local_GK, self.num_local, capacity)
        if capacity is not None:
            return index, None
        num_choices = local_GK.numel()
        bound = len(local_GK) * min(local_GK.shape[1], self.num_local)
        factor = self.comm.row_capacity_factor
        if factor is None or factor * num_choices / self.num_ranks >= bound:
            return first_rows(index, bound), None
        bound = int(factor * num_choices / self.num_ranks)
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
        ctx.pending, self = pending, pending.dispatcher
        channel = self.resources.channel("dispatch", pending.shape)
        choices = (pending.ids_TK, probs_TK.to(channel.values[0].dtype))

        # etp x ep: one row of H elements per token and rank that holds one of its experts; ids and probabilities T * K
        # to every rank
        def push() -> None:
            self.kernels.push_tokens(tokens_TH, pending.ranks_T, choices, channel)

        pending.exchange = _Exchange(self.resources, channel, push, tokens_TH, choices)
        return tokens_TH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingDispatch = ctx.pending
        self, exchange = pending.dispatcher, pending.exchange
        assert exchange is not None
        grad_TH, grad_TK = self.kernels.sum_partials(pending.ids_TK, self.owner_EP, exchange.arrive(), with_values=True)
        exchange.leave()
        pending.exchange = None
        assert grad_TK is not None
        return grad_TH, grad_TK.to(pending.probs_dtype), None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: PendingDispatch) -> tuple[Tensor, Tensor]:
        ctx.pending, self = pending, pending.dispatcher
        exchange, pending.exchange = pending.exchange, None
        assert exchange is not None
        channel = exchange.arrive()
        index, pending.needed_rows = self.sort(channel.received_ids, pending.capacity)
        rows_RH = self.kernels.permute(channel.received, index)
        probs_GK = channel.received_values.to(pending.probs_dtype, copy=True)
        exchange.leave()
        pending.handle = SymmetricHandle(pending.shape, pending.ids_TK, pending.ranks_T, index)
        ctx.index = index
        return rows_RH, probs_GK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingDispatch = ctx.pending
        self, (grad_RH, grad_GK), index = pending.dispatcher, grads, ctx.index
        channel = self.resources.channel("combine backward", pending.shape)

        # etp x ep: one row of H elements per token of another rank that has rows here, and T * K gradients
        def push() -> None:
            self.kernels.push_sums(grad_RH, index, grad_GK, channel)

        pending.exchange = _Exchange(self.resources, channel, push, grad_RH, grad_GK)
        return grad_RH.new_empty(0), None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, pending: PendingCombine) -> Tensor:
        ctx.pending, self, handle = pending, pending.dispatcher, pending.handle
        channel = self.resources.channel("combine", pending.shape)

        # etp x ep: one row of H elements per token of another rank that has rows here
        def push() -> None:
            self.kernels.push_sums(rows_RH, handle.index, None, channel)

        pending.exchange = _Exchange(self.resources, channel, push, rows_RH)
        return rows_RH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingCombine = ctx.pending
        self, exchange = pending.dispatcher, pending.exchange
        assert exchange is not None
        grad_RH = self.kernels.permute(exchange.arrive().received, pending.handle.index)
        exchange.leave()
        pending.exchange = None
        return grad_RH, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: PendingCombine) -> Tensor:
        ctx.pending, self = pending, pending.dispatcher
        exchange, pending.exchange = pending.exchange, None
        assert exchange is not None
        out_TH, _ = self.kernels.sum_partials(
            pending.handle.ids_TK, self.owner_EP, exchange.arrive(), with_values=False
        )
        exchange.leave()
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingCombine = ctx.pending
        self, (grad_TH,), handle = pending.dispatcher, grads, pending.handle
        channel = self.resources.channel("dispatch backward", pending.shape)

        # etp x ep: one row of H elements per token and rank that holds one of its experts
        def push() -> None:
            self.kernels.push_tokens(grad_TH, handle.ranks_T, None, channel)

        pending.exchange = _Exchange(self.resources, channel, push, grad_TH)
        return grad_TH.new_empty(0), None
