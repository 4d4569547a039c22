"""Transport of the flex dispatcher over symmetric memory and copy engines: exchanges occupy no SMs.

Every token is copied to all ranks of the NVLink host, also to those that hold none of its experts, because copy engines
copy whole blocks. With K experts per token and P ranks, a share of (1 - 1/P)^K of the copies is not needed: 18 % for
P = 4 and K = 6. Combine first sums the rows of every token on this rank, and then copies the sums of each rank's tokens
there. Computation that runs at the same time keeps all SMs, so exchanges cost little where a schedule overlaps them.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.moe.token_dispatcher.base import ExpertComm, Routing
from megatron_moe.moe.token_dispatcher.flex import ExchangeState, quantize_tokens
from megatron_moe.moe.token_dispatcher.symmetric import Send, SymmetricTransport
from megatron_moe.parallel.push_channel import ChannelShape, PushChannel
from megatron_moe.parallel.stream_flags import make_stream_flags
from megatron_moe.precision.quantized_tensor import QuantizedTensor

_Parts = Sequence[tuple[tuple[Tensor, ...], Tensor]]
"""Pairs of (slots of all ranks, sources [P, ...] per receiving rank)."""


class CopyTransport(SymmetricTransport):
    """Copies blocks to the slots of the other ranks.

    The flags of a channel are 0 or 1 here (`StreamFlags.take`): a rank takes the acknowledgement of each rank before it
    copies there, and takes the arrival flags of all ranks before it reads. Streams wait for flags without a timeout; a
    late rank is reported by the watchdog of the collectives.
    """

    def __init__(self, comm: ExpertComm) -> None:
        super().__init__(comm)
        self._flags = make_stream_flags(self._group, comm.ctx, "tokens")
        self._others = [(self._group.rank + step) % self._group.size for step in range(1, self._group.size)]
        """The other ranks; each rank starts with its successor, so that the ranks do not all copy to the same one."""

    def new_exchange(self, routing: Routing) -> ExchangeState:
        return ExchangeState.of(routing, transport_state=None)

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> Send:
        channel = self._channel("tokens", probs_TK is None, tokens_TH, exchange, fmt)
        sent, parts = quantize_tokens(self._kernels, tokens_TH, fmt), list[tuple[tuple[Tensor, ...], Tensor]]()
        if isinstance(sent, QuantizedTensor):
            sent, scales, _ = sent.row_copy
            parts.append((channel.scales, scales.T.contiguous()))
        parts.append((channel.tokens, sent))
        if probs_TK is not None:
            parts.append((channel.ids, exchange.ids_TK.int()))
            parts.append((channel.probs, probs_TK.to(channel.received_probs.dtype)))
        size = self._group.size
        to_all = [(slots, source.expand(size, *source.shape)) for slots, source in parts]
        return self._copy(to_all, channel, with_choices=probs_TK is not None)

    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> Send:
        channel = self._channel("sums", grad_probs is not None, rows_RH, exchange)
        num_tokens, size = len(exchange.ids_TK), self._group.size
        assert exchange.index is not None
        sums_GH = self._kernels.unpermute(rows_RH, exchange.index, size * num_tokens)
        parts = [(channel.tokens, sums_GH.unflatten(0, (size, num_tokens)))]
        if grad_probs is not None:
            values_GK = grad_probs.to(channel.received_probs.dtype)
            parts.append((channel.probs, values_GK.unflatten(0, (size, num_tokens))))
        return self._copy(parts, channel, with_choices=grad_probs is not None)

    def _copy(self, parts: _Parts, channel: PushChannel, *, with_choices: bool) -> Send:
        rank, ranks = channel.rank, self._group.ranks
        # on the current stream, because a copy within the GPU runs on SMs
        for slots, sources in parts:
            slots[rank][rank].copy_(sources[rank])

        def copy_to_others() -> None:
            for peer in self._others:
                self._flags.take(channel.acknowledged[rank][peer, :1], ranks[peer])
                for slots, sources in parts:
                    slots[peer][rank].copy_(sources[peer], non_blocking=True)
                self._flags.set(channel.arrived[peer][rank, :1], 1)

        return self._start(copy_to_others, channel, with_choices, (parts,))

    def _new_channel(self, shape: ChannelShape, timeout_s: float) -> PushChannel:
        channel = super()._new_channel(shape, timeout_s)
        channel.acknowledged[channel.rank].fill_(1)  # the slots of the other ranks are free
        return channel

    def _wait_for_peers(self, channel: PushChannel) -> None:
        for peer in self._others:
            self._flags.take(channel.arrived[channel.rank][peer, :1], self._group.ranks[peer])

    def release(self, work: Send) -> None:
        channel = work.channel
        for peer in self._others:
            self._flags.set(channel.acknowledged[peer][channel.rank, :1], 1)
