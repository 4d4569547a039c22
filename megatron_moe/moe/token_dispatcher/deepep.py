"""Transport of the flex dispatcher over DeepEP 1.2 (`deep_ep.Buffer`), within one NVLink host.

`dispatch` delivers one row per (token, destination rank), ordered by source rank and token, with local expert ids;
`num_worst_tokens` makes its shapes static, so that the host reads nothing. `combine` adds the rows of all ranks without
weights. The handle of a dispatch is reused for its combine and their gradients. Rows are bf16, or FP8 in dispatch and
in the gradient of combine; weights are fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.transport import DEEPEP_SMS, PushConfig
from megatron_moe.kernels.ops import MatrixOperand, internal_dtype
from megatron_moe.moe.token_dispatcher.base import ExpertComm, Routing, group_ranks_by_ep_rank, slots_of_choices
from megatron_moe.moe.token_dispatcher.flex import ExchangeState, ReceivedTokens, TokenTransport, quantize_tokens
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor


@dataclass
class _Handle:
    """DeepEP's handle of a routing; None before its dispatch."""

    value: Any = None


@dataclass(frozen=True)
class _DeepEPWork:
    received: Any
    event: Any
    """`EventOverlap` of the library's stream."""


class DeepEPTransport(TokenTransport):
    """Exchanges tokens through one `deep_ep.Buffer`, on its own stream; the library ends the process after its own
    timeout. Over etp every choice is sent to all ranks that hold a part of the expert: K choices become K * etp."""

    def __init__(self, comm: ExpertComm) -> None:
        from deep_ep import Buffer

        super().__init__(comm)
        self._etp = comm.etp.size
        Buffer.set_num_sms((comm.options or PushConfig()).num_sms or DEEPEP_SMS)
        self._make_buffer, self._buffer, self._row_bytes = Buffer, None, 0
        self._holders = group_ranks_by_ep_rank(comm)

    def new_exchange(self, routing: Routing) -> ExchangeState:
        return ExchangeState.of(routing, _Handle())

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> _DeepEPWork:
        buffer = self._buffer_for(tokens_TH)
        sent = _packed(quantize_tokens(self._kernels, tokens_TH, fmt))
        if probs_TK is None:
            tokens_GH, *_, event = buffer.dispatch(sent, handle=exchange.transport_state.value, async_finish=True)
            return _DeepEPWork(ReceivedTokens(_unpacked(tokens_GH, fmt, tokens_TH.dtype), None, None), event)
        ids_TC = slots_of_choices(exchange.ids_TK, self._holders, self._num_local, none=-1)
        probs_TC = self._repeated(probs_TK.to(internal_dtype(tokens_TH.dtype)))
        num_experts = self._num_local * self._group.size
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids_TC, num_experts)
        tokens_GH, ids_GC, probs_GC, _, exchange.transport_state.value, event = buffer.dispatch(
            sent,
            topk_idx=ids_TC,
            topk_weights=probs_TC,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=self._group.size * len(tokens_TH),
            async_finish=True,
        )
        return _DeepEPWork(ReceivedTokens(_unpacked(tokens_GH, fmt, tokens_TH.dtype), ids_GC, probs_GC), event)

    def receive_tokens(self, work: _DeepEPWork) -> ReceivedTokens:
        work.event.current_stream_wait()
        return work.received

    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> _DeepEPWork:
        assert exchange.index is not None
        sums_GH = self._kernels.unpermute(rows_RH, exchange.index, self._group.size * len(exchange.ids_TK))
        weights = None if grad_probs is None else grad_probs.to(internal_dtype(rows_RH.dtype))
        tokens_TH, grad_TC, event = self._buffer_for(rows_RH).combine(
            sums_GH, exchange.transport_state.value, topk_weights=weights, async_finish=True
        )
        return _DeepEPWork((tokens_TH, grad_TC), event)

    def finish_receive_sums(self, work: _DeepEPWork, exchange: ExchangeState) -> tuple[Tensor, Tensor | None]:
        work.event.current_stream_wait()
        tokens_TH, grad_TC = work.received
        if grad_TC is None:
            return tokens_TH, None
        grad_TK = grad_TC.view(*exchange.ids_TK.shape, self._etp).sum(dim=-1)
        return tokens_TH, grad_TK.masked_fill(exchange.ids_TK < 0, 0)

    def _repeated(self, probs_TK: Tensor) -> Tensor:
        return probs_TK.repeat_interleave(self._etp, dim=1) if self._etp > 1 else probs_TK

    def _buffer_for(self, rows: Tensor) -> Any:
        """Returns the buffer for rows of this width. Creating it, for wider rows than before, is collective over the
        group."""
        row_bytes = rows.shape[1] * max(rows.element_size(), 2)
        if row_bytes > self._row_bytes:
            num = self._group.size
            configs = (self._make_buffer.get_dispatch_config(num), self._make_buffer.get_combine_config(num))
            size = max(config.get_nvl_buffer_size_hint(row_bytes, num) for config in configs)
            self._buffer, self._row_bytes = self._make_buffer(self._group.handle, size, 0), row_bytes
        return self._buffer


def _packed(tokens_TH: MatrixOperand) -> Any:
    """Converts tokens to the argument of `dispatch`: [T, H], or a pair of FP8 elements [T, H] and scales [T, blocks] of
    4 bytes each (fp32, or int32 with four E8M0 scales)."""
    if isinstance(tokens_TH, Tensor):
        return tokens_TH
    data, scales, _ = tokens_TH.row_copy
    scales = scales.T.clone(memory_format=torch.contiguous_format)
    return data, scales.view(torch.int32) if scales.dtype == torch.uint8 else scales


def _unpacked(received: Any, fmt: OperandFormat | None, dtype: torch.dtype) -> MatrixOperand:
    """Converts received tokens to a tensor or `QuantizedTensor`. `dtype`: dtype of the tokens before they were
    quantised."""
    if fmt is None:
        return received
    data, scales = received
    copy = QuantizedCopy(data, (scales.view(torch.uint8) if fmt.scale == "e8m0" else scales).T)
    return QuantizedTensor(copy, None, fmt.block, dtype)
