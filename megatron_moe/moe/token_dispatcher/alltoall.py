"""All-to-all dispatcher: sends every row to the rank of its expert, and the expert's output back.

Rows are sorted by expert and exchanged in an all-to-all over ep. Etp ranks hold slices of the same experts. Over etp,
rows are all-gathered before the experts run, and the partial sums of the outputs are reduce-scattered afterwards.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.kernels.ops import RowIndex
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    DispatchedTokens,
    Dispatcher,
    ExpertComm,
    Routing,
    RowFormats,
    first_rows,
    index_rows,
)
from megatron_moe.parallel import exchange
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import AllGather, AllToAll, CollectiveExchange
from megatron_moe.parallel.grid import expert_grid


@dataclass(frozen=True)
class ExchangePlan:
    """Split sizes of one dispatch and its combine. The plans of all etp x ep ranks match."""

    over_ep: AllToAll
    """All-to-all that sends rows to the ranks of their experts."""
    over_etp: AllGather
    num_sent: int
    num_held: int
    """Number of rows that this rank's experts receive from all etp x ep ranks."""
    counts_Pe: Tensor
    """Number of rows from each of the P source ranks to each local expert, int64, in the order of `_arrival_order`."""


@dataclass(frozen=True)
class AllToAllHandle:
    """State that an all-to-all dispatch passes to its combine."""

    index: RowIndex
    """Token of each row that this rank sends."""
    order: RowIndex | None
    """Permutation that sorts the received rows by expert and pads them; None if there is only one local expert and no
    padding."""
    plan: ExchangePlan
    num_tokens: int


@dataclass(frozen=True)
class PendingAllToAll:
    """Exchange of rows and probabilities in progress."""

    rows: CollectiveExchange
    probs: CollectiveExchange
    index: RowIndex
    plan: ExchangePlan
    num_tokens: int


class AllToAllDispatcher(Dispatcher[AllToAllHandle]):
    """Dispatches by all-to-all. Buffers have exactly the number of received rows, so the host must read the split sizes
    once per dispatch. If experts are padded to their capacity, no read is needed, but all ranks must have the same
    number of tokens. Rows are sorted by expert, then by source rank (etp, then ep), then by token."""

    def __init__(self, comm: ExpertComm, formats: RowFormats = PLAIN_ROWS) -> None:
        super().__init__(comm, formats)
        self.ep, self.etp, self.etp_ep = comm.ep, comm.etp, comm.etp_ep
        self.places_P = torch.tensor(_arrival_order(comm.ctx), device=comm.ctx.device)

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingAllToAll:
        """Sorts rows by expert and starts the all-to-all."""
        index, probs_R = index_rows(routing, self.kernels)
        plan = self._counted(index) if routing.capacity is None else self._padded(routing.capacity)
        return self._started(tokens_TH, index, probs_R, plan)

    def _started(self, tokens_TH: Tensor, index: RowIndex, probs_R: Tensor, plan: ExchangePlan) -> PendingAllToAll:
        """Copies tokens to rows and starts the all-to-all."""
        rows_RH = self.kernels.permute(tokens_TH, index)
        if plan.num_sent < len(rows_RH):
            index = first_rows(index, plan.num_sent)
            rows_RH, probs_R = rows_RH[: plan.num_sent], probs_R[: plan.num_sent]
        # collective over ep: all-to-all, in backward too, of R * H elements (T * K * H if nothing is dropped) and R
        # probabilities
        rows = exchange.start_exchange(plan.over_ep, rows_RH, self.comm.overlap_weight_grads)
        probs = exchange.start_exchange(plan.over_ep, probs_R, self.comm.overlap_weight_grads)
        return PendingAllToAll(rows, probs, index, plan, len(tokens_TH))

    def finish_dispatch(self, pending: PendingAllToAll) -> tuple[DispatchedTokens, AllToAllHandle]:
        """Waits for the received rows, all-gathers them over etp, and sorts them by local expert."""
        plan = pending.plan
        # collective over etp, backward reduce-scatter: etp times the rows that this rank received
        data_RH = exchange.run_exchange(plan.over_etp, pending.rows.finish())
        probs_R = exchange.run_exchange(plan.over_etp, pending.probs.finish())
        order = self._order(plan)
        handle = AllToAllHandle(pending.index, order, plan, pending.num_tokens)
        if order is not None:
            probs_R = self.kernels.gather_probs(probs_R[:, None], order)
            rows = self.sorted_rows(data_RH, order, probs_R)
            return rows, handle
        offsets_e = torch.full((1,), plan.num_held, dtype=torch.int32, device=probs_R.device)
        return DispatchedTokens(data=data_RH, probs_R=probs_R, offsets_e=offsets_e, bound=plan.num_held), handle

    def start_combine(
        self, rows: DispatchedTokens, handle: AllToAllHandle
    ) -> tuple[CollectiveExchange, AllToAllHandle]:
        """Undoes the sort by expert, reduce-scatters the outputs over etp, and starts to send them back."""
        data_RH, plan = rows.data, handle.plan
        if handle.order is not None:
            data_RH = self.kernels.unpermute(data_RH, handle.order, plan.num_held)
        # collectives over etp (reduce-scatter, backward all-gather) and ep (all-to-all, in backward too): as many
        # elements as in dispatch
        data_RH = exchange.run_exchange(plan.over_etp.transposed, data_RH)
        return exchange.start_exchange(plan.over_ep.transposed, data_RH, self.comm.overlap_weight_grads), handle

    def finish_combine(self, pending: tuple[CollectiveExchange, AllToAllHandle]) -> Tensor:
        """Returns [T, H]: for each token of this rank, the sum of its expert outputs."""
        rows, handle = pending
        return self.kernels.unpermute(rows.finish(), handle.index, handle.num_tokens)

    def read_rows(self, rows_PQ: Tensor, num_choices: int) -> list[list[int]]:
        """Copies rows_PQ to the host. rows_PQ[p, q] is the number of rows that rank p of etp x ep sends to rank q of
        ep. `num_choices`: this rank's number of choices, from which an emulation without other ranks estimates them."""
        return rows_PQ.tolist()

    def _counted(self, index: RowIndex) -> ExchangePlan:
        """Returns the plan for experts without padding: all-gathers the row counts and copies them to the host."""
        counts_PE = self._gathered(index.offsets_E.diff(prepend=index.offsets_E.new_zeros(1)).long())
        counts_PQe = counts_PE.unflatten(1, (self.ep.size, self.num_local))
        return self._sized(counts_PQe, self.read_rows(counts_PQe.sum(dim=-1), len(index.token_R)))

    def _gathered(self, counts_E: Tensor) -> Tensor:
        """All-gathers the row counts of all P source ranks, [P, E]."""
        # collective over etp x ep: 8 * E bytes; no gradient flows through counts
        return exchange.run_exchange(AllGather(self.etp_ep), counts_E).view(self.etp_ep.size, -1)[self.places_P]

    def _sized(self, counts_PQe: Tensor, rows_PQ: list[list[int]]) -> ExchangePlan:
        """Returns the plan of an exchange with the given row counts. `rows_PQ`: see `read_rows`."""
        num_ep, here = self.ep.size, self.etp.rank * self.ep.size
        to_me = [row[self.ep.rank] for row in rows_PQ]
        send = tuple(rows_PQ[here + self.ep.rank])
        gathered = tuple(sum(to_me[i : i + num_ep]) for i in range(0, len(to_me), num_ep))
        return ExchangePlan(
            over_ep=AllToAll(self.ep, send, tuple(to_me[here : here + num_ep])),
            over_etp=AllGather(self.etp, gathered),
            num_sent=sum(send),
            num_held=sum(gathered),
            counts_Pe=counts_PQe[:, self.ep.rank],
        )

    def _padded(self, capacity: int) -> ExchangePlan:
        """Returns the plan for padded experts: every rank sends exactly `capacity` rows to every expert."""
        num_sources, device = self.etp_ep.size, self.places_P.device
        return ExchangePlan(
            over_ep=AllToAll(self.ep),
            over_etp=AllGather(self.etp),
            num_sent=self.ep.size * self.num_local * capacity,
            num_held=num_sources * self.num_local * capacity,
            counts_Pe=torch.full((num_sources, self.num_local), capacity, device=device),
        )

    def _order(self, plan: ExchangePlan) -> RowIndex | None:
        """Permutation that stably sorts the received rows by local expert and pads each expert's rows; None if the rank
        has only one expert and pads nothing."""
        num_sources, num_local = plan.counts_Pe.shape
        if num_local == 1 and self.comm.row_alignment == 1:
            return None
        expert_Pe = torch.arange(num_local, device=plan.counts_Pe.device).expand(num_sources, num_local)
        ids_R = expert_Pe.flatten().repeat_interleave(plan.counts_Pe.flatten(), output_size=plan.num_held)
        return self.kernels.sort_rows(ids_R[:, None], num_local, None, self.comm.row_alignment)


def _arrival_order(ctx: ParallelContext) -> list[int]:
    """Ranks of the etp x ep group in the order in which their rows arrive: by etp rank, then by ep rank."""
    grid, ranks = expert_grid(ctx.config), ctx.group("etp_ep").ranks
    at = [grid.coordinates(rank) for rank in ranks]
    return sorted(range(len(ranks)), key=lambda place: (at[place]["tp"], at[place]["ep"]))
