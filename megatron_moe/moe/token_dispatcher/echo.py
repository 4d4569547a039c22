"""All-to-all dispatcher that clones busy experts on ranks with fewer rows (ECHO).

Each ep rank has slots for its own experts and for clones. A planner assigns the rows of all ranks to slots
(`clone_placement.py`), and the exchange of rows treats slots as experts. The host reads the placement together with
the numbers of rows, in the one read that the all-to-all needs anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.echo import TOLERANCE_PERCENT, EchoConfig
from megatron_moe.moe.clone_placement import ClonePlacement, place_clones
from megatron_moe.moe.expert_clones import CloneSizes, ExpertClones
from megatron_moe.moe.token_dispatcher.alltoall import AllToAllDispatcher, AllToAllHandle, PendingAllToAll
from megatron_moe.moe.token_dispatcher.base import (
    PLAIN_ROWS,
    DispatchedTokens,
    ExpertComm,
    Routing,
    RowFormats,
    index_rows,
)
from megatron_moe.parallel.parameter import Parameter


@dataclass(frozen=True)
class PendingEcho(PendingAllToAll):
    """Exchange of rows and probabilities in progress, and the clones that will process some of the rows."""

    clones: ExpertClones


class HostPlacement(NamedTuple):
    """Placement of clones and rows on the host."""

    rows_PQ: list[list[int]]
    """Number of rows that source rank p sends to ep rank q."""
    clones_Qc: list[list[int]]
    """Experts of which rank q holds clones, in ascending order; -1 for unused slots, which come last."""
    own_rows: int
    """Number of rows that this rank receives for its own experts."""


class EchoDispatcher(AllToAllDispatcher):
    """Dispatches rows by all-to-all to experts and their clones."""

    weights: tuple[Parameter, ...]

    def __init__(self, comm: ExpertComm, formats: RowFormats = PLAIN_ROWS) -> None:
        super().__init__(comm, formats)
        assert isinstance(comm.options, EchoConfig), f"clones without an EchoConfig: {comm.options}"
        self.config = comm.options
        self.num_own, self.num_clones = self.num_local, self.config.moe_num_echo_experts // self.ep.size
        self.num_local = self.num_own + self.num_clones

    def register_weights(self, weights: Sequence[Parameter]) -> tuple[Parameter, ...]:
        self.weights = tuple(weights)
        for weight in self.weights:
            weight.uses = 2  # GEMMs with the rows of this rank, and gradients from clones
        return self.weights if self.config.moe_echo_expert_dispatch_overlap else ()

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> PendingEcho:
        """Places clones, assigns each row to a slot, and starts the all-to-all."""
        ids_TK = routing.ids_TK
        assert ids_TK is not None and routing.capacity is None, "clones need unpadded experts that tokens have chosen"
        counts_PE = self._gathered(routing.counts_E)
        placement = place_clones(counts_PE, self.ep.size, self.num_clones, TOLERANCE_PERCENT)
        slots_TK = self._slots(ids_TK, routing.num_experts, placement)
        num_slots = self.ep.size * self.num_local
        index, probs_R = index_rows(replace(routing, ids_TK=slots_TK, num_experts=num_slots), self.kernels)
        counts_PQs = placement.counts_PQs
        host = self.read_placement(placement.clones_Qc, counts_PQs, len(index.token_R))
        plan = self._sized(counts_PQs, host.rows_PQ)
        pending = self._started(tokens_TH, index, probs_R, plan)
        sizes = self._clone_sizes(host.clones_Qc, plan.num_held - host.own_rows)
        clones = ExpertClones(
            self.weights, self.ep, sizes, keeps_weights=not self.config.moe_echo_recompute_expert_dispatch
        )
        if self.config.moe_echo_expert_dispatch_overlap:
            clones.fetch()
        return PendingEcho(**vars(pending), clones=clones)

    def finish_dispatch(self, pending: PendingAllToAll) -> tuple[DispatchedTokens, AllToAllHandle]:
        assert isinstance(pending, PendingEcho), f"not a dispatch with clones: {pending}"
        rows, handle = super().finish_dispatch(pending)
        return replace(rows, clones=pending.clones), handle

    def read_placement(self, clones_Qc: Tensor, counts_PQs: Tensor, num_choices: int) -> HostPlacement:
        """Copies a placement to the host. `num_choices`: see `read_rows`."""
        own_rows = counts_PQs[:, self.ep.rank, : self.num_own].sum()
        parts = (counts_PQs.sum(dim=-1), clones_Qc, own_rows[None, None])
        values = iter(torch.cat([part.flatten() for part in parts]).tolist())
        rows_PQ, clones, ((own,),) = (
            [list(islice(values, part.shape[1])) for _ in range(part.shape[0])] for part in parts
        )
        return HostPlacement(rows_PQ, clones, own)

    def _slots(self, ids_TK: Tensor, num_experts: int, placement: ClonePlacement) -> Tensor:
        """Slot of each choice, int64 [T, K]; -1 for choices without an expert. The rows of an expert, sorted by token,
        are divided over its ranks in rank order."""
        rows_TK = self.kernels.sort_rows(ids_TK, num_experts, None).rows_TK
        assert rows_TK is not None, "sort_rows returns the row of each choice"
        here = self.etp.rank * self.ep.size + self.ep.rank
        ends = placement.rows_PEQ[here].flatten().cumsum(dim=0)
        entry_TK = torch.searchsorted(ends, rows_TK.long(), right=True).clamp(max=len(ends) - 1)
        return torch.where(rows_TK < 0, -1, placement.slots_EQ.flatten()[entry_TK])

    def _clone_sizes(self, clones_Qc: list[list[int]], num_rows: int) -> CloneSizes:
        """Returns the clones that this rank sends and receives, given those of all ranks (-1: unused slot)."""
        first = self.ep.rank * self.num_own
        own = range(first, first + self.num_own)
        homes = [expert // self.num_own for expert in clones_Qc[self.ep.rank] if expert >= 0]
        return CloneSizes(
            sent=tuple(tuple(expert - first for expert in clones if expert in own) for clones in clones_Qc),
            received=tuple(homes.count(rank) for rank in range(self.ep.size)),
            num_rows=num_rows,
            on_any_rank=any(expert >= 0 for clones in clones_Qc for expert in clones),
        )
