"""Transport of the flex dispatcher over HybridEP, within a host or across hosts: `deep_ep.HybridEPBuffer` of the branch
hybrid-ep of DeepEP.

Dispatch delivers the rows of this rank's experts, sorted by expert; combine sums the rows of each token. The library
all-gathers the routing map, so that all ranks compute the same layout. Tokens are bf16, probabilities fp32. All
dispatches and combines share one buffer, so they run one after the other on the exchange stream.

With a bound on the rows, the library reads nothing on the host, so CUDA graphs can contain its calls. During a capture
they run on the current stream, because the allocator reuses no memory that a captured side stream has used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.transport import HybridEPConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.moe.token_dispatcher.base import ExpertComm, Routing, group_ranks_by_ep_rank, slots_of_choices
from megatron_moe.moe.token_dispatcher.flex import ExchangeState, ReceivedRows, Transport, Work
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.streams import Streams, make_streams

_STREAM = "expert exchange"
_TOKEN_MULTIPLE = 64
"""Tokens per chunk of the library's kernels."""


@dataclass
class _TransportState:
    """State of `HybridEPTransport` for one routing (`ExchangeState.transport_state`)."""

    columns_TX: Tensor
    """int64 [T, K * etp]: column of the library's routing map for each choice and rank that holds a part of its expert;
    the number of columns if there is none."""
    counts_e: Tensor
    """Number of rows per local expert, int32; their sum may exceed the bound."""
    value: Any = None
    """The library's handle; None before the dispatch."""


class HybridEPTransport(Transport):
    """Calls one `deep_ep.HybridEPBuffer`, which serves all layers. Over etp every choice is sent to all ranks that hold
    a part of the expert, as if they were different experts. Experts with padding to their capacity get no padding rows;
    the padding only determines the row bound. The library has no timeout; the watchdog ends the run."""

    def __init__(self, comm: ExpertComm) -> None:
        super().__init__(comm)
        self._config: HybridEPConfig = comm.options or HybridEPConfig()
        self._num_columns = self._num_local * self._group.size
        self._buffer: Any = None
        self._side_streams = make_streams(comm.ctx.device, _STREAM)
        self._holders = group_ranks_by_ep_rank(comm)

    def new_exchange(self, routing: Routing) -> ExchangeState:
        assert routing.ids_TK is not None
        columns_TX = slots_of_choices(routing.ids_TK, self._holders, self._num_local, none=self._num_columns)
        # int32 is exact: a count is at most the number of tokens of the ranks
        counts_E = routing.counts_E.to(torch.int32, copy=True)
        with self._streams.fork(_STREAM):
            # collective over etp x ep: 4 * E bytes
            all_reduce_(counts_E, self._group)
        counts_e = counts_E.view(-1, self._num_local)[self._comm.ep.rank]
        exchange = ExchangeState.of(routing, _TransportState(columns_TX, counts_e))
        exchange.bound = self._num_rows(routing)
        return exchange

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> Work:
        assert fmt is None, "HybridEP sends tokens in their dtype"
        handle: _TransportState = exchange.transport_state

        def dispatch() -> tuple[Tensor, Tensor | None]:
            routing: dict[str, Any] = {"handle": handle.value}
            if probs_TK is not None:
                wide_TX = probs_TK.to(internal_dtype(tokens_TH.dtype)).repeat_interleave(self._comm.etp.size, dim=1)
                # collective over etp x ep, inside the library: all-gather of the routing maps, T * E bytes each
                routing = {
                    "routing_map": self._by_column(torch.ones_like(wide_TX, dtype=torch.bool), handle),
                    "probs": self._by_column(wide_TX, handle),
                    "num_of_experts_per_rank": self._num_local,
                }
            rows_RH, probs_R, _, _, handle.value = self._buffer_for(tokens_TH).dispatch_with_permute(
                hidden=_padded(tokens_TH),
                num_permuted_tokens=exchange.bound,
                non_blocking=True,
                **routing,
                **self._fused("fuse_permute_dispatch"),
            )
            return rows_RH, probs_R

        return self._start(dispatch, tokens_TH, probs_TK)

    def finish_receive_tokens(self, work: Work, exchange: ExchangeState) -> ReceivedRows:
        """Makes the current stream wait for the rows; unused rows are zeros."""
        rows_RH, probs_R = self._finish(work)
        counts_e = exchange.transport_state.counts_e
        unused_R = torch.arange(exchange.bound, device=rows_RH.device) >= counts_e.sum()
        rows_RH.masked_fill_(unused_R[:, None], 0)
        if probs_R is None:
            return ReceivedRows(rows_RH, None)
        ends_e = counts_e.cumsum(0)
        exchange.offsets_e = ends_e.clamp_max(exchange.bound).int()
        exchange.needed_rows = None if self._comm.overflow is None else ends_e[-1].int()
        return ReceivedRows(rows_RH, probs_R.masked_fill(unused_R, 0).to(exchange.probs_dtype))

    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> Work:
        def combine() -> tuple[Tensor, Tensor | None]:
            probs = None if grad_probs is None else grad_probs.to(internal_dtype(rows_RH.dtype))
            sums_TH, grad_TC = self._buffer_for(rows_RH).combine_with_unpermute(
                hidden=rows_RH,
                probs=probs,
                handle=exchange.transport_state.value,
                **self._fused("fuse_unpermute_combine"),
            )
            return sums_TH, grad_TC

        return self._start(combine, rows_RH, grad_probs)

    def finish_receive_sums(self, work: Work, exchange: ExchangeState) -> tuple[Tensor, Tensor | None]:
        sums_TH, grad_TC = self._finish(work)
        num_tokens = len(exchange.ids_TK)
        if grad_TC is None:
            return sums_TH[:num_tokens], None
        # choices without an expert use an additional column of zeros
        grad_TX = pad(grad_TC[:num_tokens], (0, 1)).gather(1, exchange.transport_state.columns_TX)
        return sums_TH[:num_tokens], grad_TX.unflatten(1, (-1, self._comm.etp.size)).sum(dim=-1)

    @property
    def _streams(self) -> Streams:
        """Streams of the exchange; only the current stream is used during a capture."""
        return self._side_streams.none_while_capturing()

    def _num_rows(self, routing: Routing) -> int:
        """Number of rows to allocate for the experts of this rank."""
        assert routing.ids_TK is not None
        (num_tokens, topk), ranks = routing.ids_TK.shape, self._group.size
        if routing.capacity is not None:
            return ranks * self._num_local * routing.capacity
        most, factor = ranks * num_tokens * min(topk, self._num_local), self._comm.row_capacity_factor
        return most if factor is None else min(most, int(factor * self._comm.etp.size * num_tokens * topk))

    def _by_column(self, values_TX: Tensor, handle: _TransportState) -> Tensor:
        """Scatters `values_TX` to the columns `handle.columns_TX` of a zero tensor [T, C], and pads it."""
        wide = values_TX.new_zeros(len(values_TX), self._num_columns + 1)
        return _padded(wide.scatter_(1, handle.columns_TX, values_TX)[:, :-1].contiguous())

    def _fused(self, name: str) -> dict[str, bool]:
        return {name: True} if self._config.fuse_permute else {}

    def _start(self, call: Callable[[], tuple[Tensor, Tensor | None]], *read: Any) -> Work:
        """Calls the library on the exchange stream. `read`: tensors that it reads, kept until `_finish`."""
        with self._streams.fork(_STREAM):
            return call(), self._streams.record(), read

    def _finish(self, work: Work) -> tuple[Tensor, Tensor | None]:
        results, event, _ = work
        self._streams.wait(event)
        for tensor in results:
            if tensor is not None:
                self._streams.record_use(tensor)
        return results

    def _buffer_for(self, rows: Tensor) -> Any:
        """Returns the library's buffer, which the first call creates. The library enlarges it for more or wider
        tokens."""
        if self._buffer is None:
            from deep_ep import HybridEPBuffer

            config, num_sms = self._config, self._config.num_sms
            settings = {
                "num_sms_dispatch_api": num_sms,
                "num_sms_combine_api": num_sms,
                "num_sms_preprocessing_api": config.num_sms_preprocessing,
                "num_blocks_permute": config.num_blocks_permute,
                "num_blocks_unpermute": config.num_blocks_unpermute,
            }
            self._buffer = HybridEPBuffer(
                group=self._group.handle,
                hidden_dim=rows.shape[1],
                max_num_of_tokens_per_rank=len(_padded(rows)),
                num_local_experts=self._num_local,
                **{name: value for name, value in settings.items() if value is not None},
            )
        return self._buffer


def _padded(rows: Tensor) -> Tensor:
    """Adds rows of zeros up to a multiple of `_TOKEN_MULTIPLE`."""
    missing = -len(rows) % _TOKEN_MULTIPLE
    return pad(rows, (0, 0, 0, missing)) if missing else rows
