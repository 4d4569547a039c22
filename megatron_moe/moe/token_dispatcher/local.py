"""Local dispatcher: with all experts on one rank, tokens are only sorted by expert and back."""

from dataclasses import dataclass

from torch import Tensor

from megatron_moe.kernels.ops import RowIndex
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, Routing, index_rows


@dataclass(frozen=True)
class LocalHandle:
    """State of a dispatch for combine."""

    index: RowIndex
    num_tokens: int


class LocalDispatcher:
    """Dispatches without communication or host synchronisation. Buffers have the exact bound: T * K rows, or the
    experts' capacity when they are padded to it. All work is done in `finish_dispatch` and `finish_combine`."""

    host_reads = 0
    can_overflow = False

    def __init__(self, num_experts: int, comm: ExpertComm) -> None:
        self.kernels = comm.kernels

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        return tokens_TH, routing

    def finish_dispatch(self, pending: tuple[Tensor, Routing]) -> tuple[DispatchedTokens, LocalHandle]:
        """Copies every token to the rows of its experts; rows that hold nothing are zeros."""
        tokens_TH, routing = pending
        index, probs_R = index_rows(routing, self.kernels)
        rows = DispatchedTokens(
            data=self.kernels.permute(tokens_TH, index),
            probs_R=probs_R,
            offsets_e=index.offsets_E,
            bound=len(index.token_R),
        )
        return rows, LocalHandle(index, len(tokens_TH))

    def start_combine(self, rows: DispatchedTokens, handle: LocalHandle) -> tuple[DispatchedTokens, LocalHandle]:
        return rows, handle

    def finish_combine(self, pending: tuple[DispatchedTokens, LocalHandle]) -> Tensor:
        """[T, H]: the sum of every token's rows."""
        rows, handle = pending
        return self.kernels.unpermute(rows.data, handle.index, handle.num_tokens)
