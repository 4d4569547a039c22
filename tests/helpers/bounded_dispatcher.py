"""Token dispatcher with a row bound that leaves the gather of rows to fc1, for tests of the dispatcher interface."""

from megatron_moe.config.transport import ExpertTransport, RowBound, SentCopies
from megatron_moe.kernels.ops import Kernels
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.moe.token_dispatcher.allgather import AllGatherDispatcher, PendingAllGather
from megatron_moe.moe.token_dispatcher.base import CombineHandle, DispatchedTokens, ExpertComm, index_rows
from megatron_moe.parallel.context import ParallelContext


class BoundedDispatcher(AllGatherDispatcher):
    """All-gather dispatcher that lets fc1 gather its rows."""

    max_rows = 1 << 30
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


BOUNDED = ExpertTransport(
    name="bounded",
    dispatcher=BoundedDispatcher,
    copies=SentCopies.ALL_RANKS,
    rows=RowBound.BOUNDED,
    can_gather_in_fc1=True,
)


def bounded_comm(ctx: ParallelContext, kernels: Kernels, num_experts: int) -> ExpertComm:
    return ExpertComm(ctx, kernels, BOUNDED, num_experts, row_capacity_factor=1.0)


def gather_in_fc1(layer: MoELayer) -> None:
    """Replaces the layer's dispatcher by a `BoundedDispatcher`."""
    comm = layer.expert_comm
    layer.expert_comm = bounded_comm(comm.ctx, comm.kernels, comm.num_experts)
    layer.dispatcher = layer.expert_comm.new_dispatcher()
