"""All-gather dispatcher over etp x ep ranks: every rank receives all tokens and keeps the rows of its local experts.

Each rank sums its expert outputs per token. A reduce-scatter then adds the sums of all ranks: ep ranks have different
experts, and etp ranks have partial sums of the same experts. No split sizes are needed. Efficient for few ranks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    CombineHandle,
    DispatchedTokens,
    Dispatcher,
    ExpertComm,
    Routing,
    RowFormats,
    index_rows,
)
from megatron_moe.parallel import exchange
from megatron_moe.parallel.exchange import AllGather, CollectiveExchange, ReduceScatter


@dataclass(frozen=True)
class PendingAllGather:
    """All-gathers of tokens and routing in progress."""

    tokens: CollectiveExchange
    choices: CollectiveExchange
    """Expert ids [T, K], or for expert choice the map [T, E], as in `Routing`."""
    probs: CollectiveExchange
    routing: Routing


class AllGatherDispatcher(Dispatcher[CombineHandle]):
    """Dispatches by all-gather, without host synchronisation. Buffers have as many rows as any routing can need: tokens
    of all ranks times min(K, local experts), or, if experts are padded, the total capacity of the local experts. All
    ranks must have the same number of tokens. Rows are sorted by expert, then by source rank, then by token."""

    def __init__(self, comm: ExpertComm, formats: RowFormats = PLAIN_ROWS) -> None:
        super().__init__(comm, formats)
        self.group = comm.etp_ep
        self.first = comm.ep.rank * self.num_local

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingAllGather:
        """Starts the all-gathers of tokens, expert choices and probabilities."""
        everyone = AllGather(self.group)
        choices = routing.ids_TK if routing.map_TE is None else routing.map_TE
        assert choices is not None, "a Routing needs either ids_TK or map_TE"
        # collective over etp x ep, backward reduce-scatter: T * H elements, and T * K probabilities and ids
        overlap = self.comm.overlap_weight_grads
        tokens, ids = exchange.start_exchange(everyone, tokens_TH, overlap), exchange.start_exchange(everyone, choices)
        return PendingAllGather(tokens, ids, exchange.start_exchange(everyone, routing.probs, overlap), routing)

    def finish_dispatch(self, pending: PendingAllGather) -> tuple[DispatchedTokens, CombineHandle]:
        """Copies the tokens of all ranks to the rows of this rank's experts; padding rows are zeros."""
        tokens_TH, choices, probs = pending.tokens.finish(), pending.choices.finish(), pending.probs.finish()
        # at most min(K, local experts) rows per token
        bound = len(tokens_TH) * min(choices.shape[1], self.num_local) if pending.routing.capacity is None else None
        index, probs_R = index_rows(self._of_my_experts(pending.routing, choices, probs), self.kernels, bound)
        rows = self.sorted_rows(tokens_TH, index, probs_R)
        return rows, CombineHandle(index, len(tokens_TH))

    def start_combine(self, rows: DispatchedTokens, handle: CombineHandle) -> tuple[CollectiveExchange, torch.dtype]:
        """Sums this rank's expert outputs per token and starts the reduce-scatter, which sums them over ranks."""
        data_RH = rows.data
        wide_RH = data_RH.to(internal_dtype(data_RH.dtype))
        sums_TH = self.kernels.unpermute(wide_RH, handle.index, handle.num_tokens)
        # collective over etp x ep, backward all-gather: T * H elements of promote(fp32, dtype) for every rank
        return exchange.start_exchange(
            ReduceScatter(self.group), sums_TH, self.comm.overlap_weight_grads
        ), data_RH.dtype

    def finish_combine(self, pending: tuple[CollectiveExchange, torch.dtype]) -> Tensor:
        """Returns [T, H]: for each token of this rank, the sum of its expert outputs."""
        sums, dtype = pending
        return sums.finish().to(dtype)

    def _of_my_experts(self, routing: Routing, choices: Tensor, probs: Tensor) -> Routing:
        """Returns the routing of all ranks' tokens to this rank's experts. Expert ids are local; other choices get id
        -1."""
        capacity = None if routing.capacity is None else routing.capacity * self.group.size
        local = Routing(num_experts=self.num_local, counts_E=routing.counts_E, capacity=capacity)
        if routing.map_TE is not None:
            own_experts = slice(self.first, self.first + self.num_local)
            return replace(local, map_TE=choices[:, own_experts], probs_TE=probs[:, own_experts])
        ids_TK = choices - self.first
        elsewhere = (ids_TK < 0) | (ids_TK >= self.num_local)
        return replace(local, ids_TK=ids_TK.masked_fill(elsewhere, -1), probs_TK=probs)
