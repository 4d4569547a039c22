"""The dispatcher of one rank: all experts are here, so tokens are only sorted by expert and back."""

from dataclasses import dataclass

from torch import Tensor

from megatron_moe.kernels.ops import RowIndex
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, Routing, index_rows


@dataclass(frozen=True)
class LocalHandle:
    """What combine needs of dispatch."""

    index: RowIndex
    num_tokens: int


class LocalDispatcher:
    """Nothing travels and the host reads nothing. Buffers have the exact bound: every choice of every token, or every
    expert's capacity when experts are padded to it. Both halves of an exchange do their work in `finish`."""

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
