"""Transport of the flex dispatcher over symmetric memory: pushes to the memory of the other ranks of an NVLink host."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.transport import PushConfig
from megatron_moe.kernels.sm_carveout import ignore_warnings, release_sms, reserve_sms
from megatron_moe.moe.token_dispatcher.base import ExpertComm, LateRank, Routing, group_ranks_by_ep_rank
from megatron_moe.moe.token_dispatcher.flex import ExchangeState, ReceivedTokens, TokenTransport, quantize_tokens
from megatron_moe.parallel.push_channel import ChannelShape, PushChannel, new_channel
from megatron_moe.parallel.streams import make_streams
from megatron_moe.parallel.symmetric_memory import allocate_symmetric, is_emulated

_STREAM = "expert exchange"
_ALTERNATIVE = "--moe-token-dispatcher-type alltoall"
_PAST_ALL_EPOCHS = 1 << 30
_SHARE_OF_TIMEOUT = 0.9
"""Timeout of an exchange as a fraction of the timeout of collectives. It is below 1 so that the late rank is reported
before a collective that waits for the same rank aborts the process."""


class Send:
    """Rows on their way to other ranks, on the exchange stream."""

    def __init__(self, channel: PushChannel, with_choices: bool, keep: tuple[Any, ...]) -> None:
        self.channel, self.with_choices = channel, with_choices
        self.keep = keep
        """Tensors that are read on the exchange stream; they are kept alive until the stream that allocated them has
        waited for it."""


class SymmetricTransport(TokenTransport):
    """Pushes rows to the ranks that need them, which are on one host.

    One channel carries tokens (dispatch and the gradient of combine) and one carries sums (combine and the gradient of
    dispatch). If the schedule overlaps the forward of one microbatch with the backward of another, each pass has its
    own two, because exchanges of both are in progress at the same time.
    """

    def __init__(self, comm: ExpertComm) -> None:
        super().__init__(comm)
        self._num_sms = (comm.options or PushConfig()).num_sms
        priority = comm.ctx.config.high_priority_a2a_comm_stream
        self._streams = make_streams(comm.ctx.device, _STREAM, high_priority=priority)
        self._num_in_flight = 0
        if self._num_sms is not None:
            ignore_warnings()
        self._channels: dict[tuple[str, bool, ChannelShape], PushChannel] = {}
        self._first = comm.ep.rank * self._num_local
        owner_of_ep_rank = torch.zeros(comm.ep.size, self._group.size, dtype=torch.bool, device=comm.ctx.device)
        owner_of_ep_rank.scatter_(1, group_ranks_by_ep_rank(comm), True)
        self._owner_EP = owner_of_ep_rank.repeat_interleave(self._num_local, dim=0)
        """Whether a rank holds an expert, or a part of it: bool [E, P]."""

    def new_exchange(self, routing: Routing) -> ExchangeState:
        assert routing.ids_TK is not None
        return ExchangeState.of(routing, self._kernels.mark_ranks(routing.ids_TK, self._owner_EP))

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> Send:
        channel = self._channel("tokens", probs_TK is None, tokens_TH, exchange, fmt)
        choices = None if probs_TK is None else (exchange.ids_TK, probs_TK.to(channel.received_probs.dtype))
        sent = quantize_tokens(self._kernels, tokens_TH, fmt)

        def push() -> None:
            self._kernels.push_tokens(sent, exchange.transport_state, choices, channel)

        return self._start(push, channel, choices is not None, (sent, choices, exchange))

    def receive_tokens(self, work: Send) -> ReceivedTokens:
        channel = self._arrive(work)
        if not work.with_choices:
            return ReceivedTokens(channel.received, None, None)
        ids_GK, probs_GK = channel.received_ids, channel.received_probs
        return ReceivedTokens(channel.received, ids_GK, probs_GK, first_expert=self._first)

    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> Send:
        channel = self._channel("sums", grad_probs is not None, rows_RH, exchange)
        index, grad_GK = exchange.index, grad_probs
        assert index is not None
        rows, is_summed = rows_RH, self._num_sms is not None
        if is_summed:  # on few SMs, with others busy, reading the rows would be slow
            rows = self._kernels.unpermute(rows_RH, index, self._group.size * len(exchange.ids_TK))

        def push() -> None:
            self._kernels.push_sums(rows, index, grad_GK, channel, is_summed=is_summed)

        return self._start(push, channel, grad_GK is not None, (rows, index, grad_GK))

    def finish_receive_sums(self, work: Send, exchange: ExchangeState) -> tuple[Tensor, Tensor | None]:
        channel = self._arrive(work)
        sums = self._kernels.sum_partials(exchange.ids_TK, self._owner_EP, channel, with_values=work.with_choices)
        self.release(work)
        return sums

    def release(self, work: Send) -> None:
        self._kernels.acknowledge(work.channel)

    def late_rank(self) -> LateRank | None:
        """First rank that did not send or acknowledge in time in an exchange so far; None if all did. Does not
        synchronise with the device."""
        for (content, *_), channel in tuple(self._channels.items()):
            late = int(channel.late_rank_flag)
            if late:
                return LateRank(self._group.ranks[late - 1], content, channel.timeout_s)
        return None

    def _start(self, push: Callable[[], None], channel: PushChannel, with_choices: bool, keep: tuple[Any, ...]) -> Send:
        streams = self._streams
        with streams.fork(_STREAM):
            before = streams.record()
            push()
        self._num_in_flight += 1
        if self._num_sms is not None:
            reserve_sms(self._num_sms, self._comm.ctx.device)
            streams.wait(before)  # prevents later work from occupying the SMs before the push starts
        return Send(channel, with_choices, keep)

    def _arrive(self, exchange: Send) -> PushChannel:
        """Makes the current stream wait until all ranks have pushed."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            release_sms()
        with self._streams.on(_STREAM):
            self._wait_for_peers(exchange.channel)
            arrived = self._streams.record()
        self._streams.wait(arrived)
        exchange.keep = ()
        return exchange.channel

    def _wait_for_peers(self, channel: PushChannel) -> None:
        self._kernels.wait_for_peers(channel)

    def _channel(
        self, content: str, in_backward: bool, rows: Tensor, exchange: ExchangeState, fmt: OperandFormat | None = None
    ) -> PushChannel:
        """Returns the channel for tokens or sums of this shape; creates it on first use (collective over the group)."""
        num_tokens, topk = exchange.ids_TK.shape
        sizes = {"num_ranks": self._group.size, "num_tokens": num_tokens, "width": rows.shape[1], "topk": topk}
        shape = ChannelShape(**sizes, dtype=rows.dtype, fmt=fmt)
        ctx, group = self._comm.ctx, self._group
        timeout_s = _SHARE_OF_TIMEOUT * ctx.timeout_s
        key = (content, in_backward and self._comm.overlaps_microbatches, shape)
        if key not in self._channels:
            channel = self._new_channel(shape, timeout_s)
            if is_emulated(group, ctx):  # in emulation, the other ranks never arrive
                channel.arrived[group.rank].fill_(_PAST_ALL_EPOCHS)
                channel.acknowledged[group.rank].fill_(_PAST_ALL_EPOCHS)
            self._channels[key] = channel
        channel = self._channels[key]
        if channel.timeout_s != timeout_s:
            channel = self._channels[key] = replace(channel, timeout_s=timeout_s)
        return channel

    def _new_channel(self, shape: ChannelShape, timeout_s: float) -> PushChannel:
        ctx, group = self._comm.ctx, self._group
        return new_channel(
            shape,
            group.rank,
            partial(allocate_symmetric, group=group, ctx=ctx, purpose="exchange tokens", alternative=_ALTERNATIVE),
            timeout_s=timeout_s,
            num_programs=self._num_sms,
        )
