"""Token dispatcher with token-major storage and a row bound, for tests of the dispatcher interface."""

from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.moe.token_dispatcher.allgather import AllGatherDispatcher, PendingAllGather
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    CombineHandle,
    DispatchedTokens,
    ExpertComm,
    RowFormats,
    index_rows,
)


class TokenMajorDispatcher(AllGatherDispatcher):
    """All-gather dispatcher that lets the experts gather their rows."""

    can_overflow = True

    def __init__(self, num_experts: int, comm: ExpertComm, formats: RowFormats = PLAIN_ROWS) -> None:
        super().__init__(num_experts, comm, formats)
        self.max_rows = 1 << 30
        """Row bound; more rows overflow."""

    def finish_dispatch(self, pending: PendingAllGather) -> tuple[DispatchedTokens, CombineHandle]:
        tokens_TH, choices, probs = pending.tokens.finish(), pending.choices.finish(), pending.probs.finish()
        index, probs_R = index_rows(self._of_my_experts(pending.routing, choices, probs), self.kernels)
        rows = DispatchedTokens(
            data=tokens_TH,
            probs_R=probs_R,
            offsets_e=index.offsets_E,
            index=index,
            bound=len(probs_R),
            overflow=(index.offsets_E[-1] - self.max_rows).clamp_min(0),
        )
        return rows, CombineHandle(index, len(tokens_TH))


def use_token_major(layer: MoELayer) -> None:
    """Replaces the dispatcher of a layer."""
    comm = layer.expert_comm
    layer.expert_comm = ExpertComm(comm.ctx, comm.kernels, TokenMajorDispatcher, row_capacity_factor=1.0)
    layer.dispatcher = layer.expert_comm.new_dispatcher(layer.router.config.num_experts)
