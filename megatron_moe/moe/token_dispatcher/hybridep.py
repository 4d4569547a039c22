"""Dispatcher over HybridEP (`deep_ep.HybridEPBuffer`, branch hybrid-ep of DeepEP), within a host or across hosts.

Dispatch delivers the rows of this rank's experts, sorted by expert; combine sums the rows of each token. The library
all-gathers the routing map, so that all ranks compute the same layout. Tokens are bf16, probabilities fp32. Its
dispatches and combines share one buffer and run one after the other, on the exchange stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    DispatchedTokens,
    ExpertComm,
    Routing,
    RowFormats,
    holders_of_experts,
)
from megatron_moe.moe.token_dispatcher.flex import Pending, Work
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.streams import make_streams

_STREAM = "expert exchange"
_TOKEN_MULTIPLE = 64
"""Tokens per chunk of the library's kernels."""


@dataclass
class HybridEPHandle:
    """State of a dispatch for combine and for the gradients of both."""

    columns_TX: Tensor
    """int64 [T, K * etp]: column of the library's routing map for each choice and rank that holds a part of its expert;
    the number of columns if there is none."""
    num_rows: int
    """Number of rows that are allocated."""
    counts_e: Tensor
    """int64 number of rows per local expert; they may exceed `num_rows` together."""
    value: Any = None
    """The library's handle; None before the dispatch."""


class HybridEPTransport:
    """Calls one `deep_ep.HybridEPBuffer`, which serves all layers. Over etp every choice is sent to all ranks that hold
    a part of the expert, as if they were different experts."""

    def __init__(self, num_experts: int, comm: ExpertComm) -> None:
        self._comm, self._group, self._config = comm, comm.etp_ep, comm.hybridep
        self._num_local = num_experts // comm.ep.size
        self._num_columns = self._num_local * self._group.size
        self._buffer: Any = None
        self._streams = make_streams(comm.ctx.device, _STREAM)
        self._holders = holders_of_experts(comm)

    def new_handle(self, ids_TK: Tensor, counts_E: Tensor, num_rows: int) -> HybridEPHandle:
        """Handle of a dispatch of choices `ids_TK` (global ids; -1: none). `counts_E`: number of choices per expert."""
        ranks_TKP = self._holders[ids_TK.clamp_min(0) // self._num_local]
        columns_TKP = ranks_TKP * self._num_local + (ids_TK % self._num_local)[..., None]
        columns_TX = columns_TKP.masked_fill((ids_TK < 0)[..., None], self._num_columns).flatten(1)
        counts_E = counts_E.clone()
        with self._streams.fork(_STREAM):
            all_reduce_(counts_E, self._group)  # etp x ep: 8 * E bytes
        return HybridEPHandle(columns_TX, num_rows, counts_E.view(-1, self._num_local)[self._comm.ep.rank])

    def start_dispatch(self, tokens_TH: Tensor, probs_TK: Tensor | None, handle: HybridEPHandle) -> Work:
        """Starts to send tokens and probabilities to the ranks of their experts; None: gradients of combine, which go
        the same way."""

        def dispatch() -> tuple[Tensor, Tensor | None]:
            routing: dict[str, Any] = {"handle": handle.value}
            if probs_TK is not None:
                wide_TX = probs_TK.to(internal_dtype(tokens_TH.dtype)).repeat_interleave(self._comm.etp.size, dim=1)
                routing = {
                    "routing_map": self._by_column(torch.ones_like(wide_TX, dtype=torch.bool), handle),
                    "probs": self._by_column(wide_TX, handle),
                    "num_of_experts_per_rank": self._num_local,
                }
            rows_RH, probs_R, _, _, handle.value = self._buffer_for(tokens_TH).dispatch_with_permute(
                hidden=_padded(tokens_TH),
                num_permuted_tokens=handle.num_rows,
                non_blocking=True,
                **routing,
                **self._fused("fuse_permute_dispatch"),
            )
            return rows_RH, probs_R

        return self._start(dispatch, tokens_TH, probs_TK)

    def finish_dispatch(self, work: Work, handle: HybridEPHandle) -> tuple[Tensor, Tensor | None]:
        """Makes the current stream wait for the rows [R, H] and their probabilities [R]; unused rows are zeros."""
        rows_RH, probs_R = self._finish(work)
        unused_R = torch.arange(handle.num_rows, device=rows_RH.device) >= handle.counts_e.sum()
        rows_RH.masked_fill_(unused_R[:, None], 0)
        return rows_RH, None if probs_R is None else probs_R.masked_fill(unused_R, 0)

    def start_combine(self, rows_RH: Tensor, probs_R: Tensor | None, handle: HybridEPHandle) -> Work:
        """Starts to sum the rows of each token, and to send the gradients `probs_R` of probabilities back."""

        def combine() -> tuple[Tensor, Tensor | None]:
            probs = None if probs_R is None else probs_R.to(internal_dtype(rows_RH.dtype))
            sums_TH, grad_TC = self._buffer_for(rows_RH).combine_with_unpermute(
                hidden=rows_RH, probs=probs, handle=handle.value, **self._fused("fuse_unpermute_combine")
            )
            return sums_TH, grad_TC

        return self._start(combine, rows_RH, probs_R)

    def finish_combine(self, work: Work, handle: HybridEPHandle) -> tuple[Tensor, Tensor | None]:
        """Makes the current stream wait for the sums [T, H] and the gradients of the probabilities [T, K]."""
        sums_TH, grad_TC = self._finish(work)
        num_tokens = len(handle.columns_TX)
        if grad_TC is None:
            return sums_TH[:num_tokens], None
        # a column of zeros for choices without expert
        grad_TX = pad(grad_TC[:num_tokens], (0, 1)).gather(1, handle.columns_TX)
        return sums_TH[:num_tokens], grad_TX.unflatten(1, (-1, self._comm.etp.size)).sum(dim=-1)

    def late_rank(self) -> None:
        """None: HybridEP has no timeout; the watchdog ends the run."""

    def _by_column(self, values_TX: Tensor, handle: HybridEPHandle) -> Tensor:
        """[T, C]: `values_TX` at `handle.columns_TX`, zeros elsewhere, padded."""
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
        return results  # type: ignore[no-any-return]

    def _buffer_for(self, rows: Tensor) -> Any:
        """The library's buffer, created for the first rows. The library enlarges it for more or wider tokens."""
        if self._buffer is None:
            from deep_ep import HybridEPBuffer

            config, num_sms = self._config, self._comm.num_sms
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


class HybridEPPendingDispatch(Pending):
    """A dispatch in progress; in the backward, the exchange of the gradients of tokens and probabilities."""

    def __init__(self, dispatcher: "HybridEPDispatcher", tokens_TH: Tensor, routing: Routing) -> None:
        super().__init__(dispatcher.comm)
        assert routing.ids_TK is not None and routing.probs_TK is not None, "a dense routing needs another dispatcher"
        self.transport, self.probs_dtype = dispatcher.transport, routing.probs_TK.dtype
        self.handle = self.transport.new_handle(routing.ids_TK, routing.counts_E, dispatcher.num_rows(routing))
        self.exchange(tokens_TH, routing.probs_TK)

    def start(self, *inputs: Tensor) -> Work:
        tokens_TH, probs_TK = inputs
        # etp x ep: a row of H elements per token and rank that holds one of its experts, and one probability per row;
        # the routing map, T * E bytes, to every rank
        return self.transport.start_dispatch(tokens_TH, probs_TK, self.handle)

    def finish(self, work: Work) -> tuple[Tensor, Tensor]:
        rows_RH, probs_R = self.transport.finish_dispatch(work, self.handle)
        assert probs_R is not None
        return rows_RH, probs_R.to(self.probs_dtype)

    def start_backward(self, *grads: Tensor) -> Work:
        grad_RH, grad_R = grads
        # etp x ep: a row of H elements per token of another rank that has rows here, and one gradient per row
        return self.transport.start_combine(grad_RH, grad_R, self.handle)

    def finish_backward(self, work: Work) -> tuple[Tensor | None, ...]:
        grad_TH, grad_TK = self.transport.finish_combine(work, self.handle)
        assert grad_TK is not None
        return grad_TH, grad_TK.to(self.probs_dtype)


class HybridEPPendingCombine(Pending):
    """A combine in progress; in the backward, the exchange of the gradient of its result."""

    def __init__(self, dispatcher: "HybridEPDispatcher", rows_RH: Tensor, handle: HybridEPHandle) -> None:
        super().__init__(dispatcher.comm)
        self.transport, self.handle = dispatcher.transport, handle
        self.exchange(rows_RH)

    def start(self, *inputs: Tensor) -> Work:
        # etp x ep: a row of H elements per token of another rank that has rows here
        return self.transport.start_combine(inputs[0], None, self.handle)

    def finish(self, work: Work) -> Tensor:
        return self.transport.finish_combine(work, self.handle)[0]

    def start_backward(self, *grads: Tensor) -> Work:
        # etp x ep: a row of H elements per token and rank that holds one of its experts
        return self.transport.start_dispatch(grads[0], None, self.handle)

    def finish_backward(self, work: Work) -> tuple[Tensor | None, ...]:
        return (self.transport.finish_dispatch(work, self.handle)[0],)


class HybridEPDispatcher:
    """Dispatches without host synchronisation. The number of rows of a rank is bounded as with the flex dispatcher;
    more rows are counted as overflow. All ranks must have equally many tokens. Rows are sorted by expert. Experts that
    are padded to their capacity get no padding rows: only the bound is that of padded experts."""

    host_reads = 0
    can_overflow = True
    can_be_captured = False
    can_gather_in_fc1 = False
    sends_fp8 = False

    def __init__(self, num_experts: int, comm: ExpertComm, formats: RowFormats = PLAIN_ROWS) -> None:
        comm.transport = comm.transport or HybridEPTransport(num_experts, comm)
        self.comm, self.transport = comm, comm.transport
        self.num_local = num_experts // comm.ep.size

    def num_rows(self, routing: Routing) -> int:
        """Number of rows to allocate for the experts of this rank."""
        assert routing.ids_TK is not None
        (num_tokens, topk), ranks = routing.ids_TK.shape, self.comm.etp_ep.size
        if routing.capacity is not None:
            return ranks * self.num_local * routing.capacity
        most, factor = ranks * num_tokens * min(topk, self.num_local), self.comm.row_capacity_factor
        return most if factor is None else min(most, int(factor * self.comm.etp.size * num_tokens * topk))

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> HybridEPPendingDispatch:
        """Starts to send tokens and probabilities."""
        return HybridEPPendingDispatch(self, tokens_TH, routing)

    def finish_dispatch(self, pending: HybridEPPendingDispatch) -> tuple[DispatchedTokens, HybridEPHandle]:
        """Waits for the rows of this rank's experts."""
        handle = pending.handle
        rows_RH, probs_R = pending.received()
        ends_e = handle.counts_e.cumsum(0)
        rows = DispatchedTokens(
            data=rows_RH,
            probs_R=probs_R,
            offsets_e=ends_e.clamp_max(handle.num_rows).int(),
            bound=handle.num_rows,
            overflow=None if self.comm.overflow is None else (ends_e[-1] - handle.num_rows).clamp_min(0).int(),
        )
        return rows, handle

    def start_combine(self, rows: DispatchedTokens, handle: HybridEPHandle) -> HybridEPPendingCombine:
        """Starts to sum the rows of every token."""
        return HybridEPPendingCombine(self, rows.data, handle)

    def finish_combine(self, pending: HybridEPPendingCombine) -> Tensor:
        """[T, H]: the sum of every token's rows."""
        out_TH: Tensor = pending.received()
        return out_TH


def _padded(rows: Tensor) -> Tensor:
    """Adds rows of zeros up to a multiple of `_TOKEN_MULTIPLE`."""
    missing = -len(rows) % _TOKEN_MULTIPLE
    return pad(rows, (0, 0, 0, missing)) if missing else rows
