"""Local dispatcher, for ranks that have all experts: sorts tokens by expert and restores their order."""

from dataclasses import replace

from torch import Tensor

from megatron_moe.moe.token_dispatcher.base import CombineHandle, DispatchedTokens, Dispatcher, Routing, index_rows


class LocalDispatcher(Dispatcher[CombineHandle]):
    """Dispatches without communication or host synchronisation. Buffers have T * K rows, or E * capacity rows if
    experts are padded. All work is done in `finish_dispatch` and `finish_combine`, or by the experts if fc1
    gathers its rows."""

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        return tokens_TH, routing

    def finish_dispatch(self, pending: tuple[Tensor, Routing]) -> tuple[DispatchedTokens, CombineHandle]:
        """Copies every token to the rows of its experts; padding rows are zeros."""
        tokens_TH, routing = pending
        index, probs_R = index_rows(routing, self.kernels, align=self.comm.row_alignment)
        rows = self.sorted_rows(tokens_TH, index, probs_R)
        return replace(rows, sums_tokens=self.formats.gathers_in_fc1), CombineHandle(index, len(tokens_TH))

    def start_combine(self, rows: DispatchedTokens, handle: CombineHandle) -> tuple[DispatchedTokens, CombineHandle]:
        return rows, handle

    def finish_combine(self, pending: tuple[DispatchedTokens, CombineHandle]) -> Tensor:
        """Returns [T, H]: for each token, the sum of its expert outputs."""
        rows, handle = pending
        if rows.index is not None:
            return rows.data
        return self.kernels.unpermute(rows.data, handle.index, handle.num_tokens)
