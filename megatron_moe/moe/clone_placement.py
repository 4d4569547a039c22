"""Planner of expert clones (ECHO): computes from the row counts of all ranks which ranks process rows of which experts.

All shapes depend on the layout only, and nothing is read on the host. Every rank computes the same integers from the
same counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClonePlacement:
    """Rows of every expert by source rank and by the ep rank that processes them, on the device.

    Q is the number of ep ranks, P the number of source ranks (etp x ep, by etp rank, then by ep rank), E the number of
    experts, c the number of clone slots per rank. Expert x belongs to its home rank x // (E / Q).
    """

    rows_PEQ: Tensor
    """Number of rows of source p and expert x that rank q processes, int64."""
    clones_Qc: Tensor
    """Experts of which rank q holds clones, in ascending order, int64; -1 for unused slots, which come last."""

    @property
    def slots_EQ(self) -> Tensor:
        """Slot of expert x on rank q, int64. Rank q has E / Q + c slots, of which the first belong to its own experts.
        Undefined where the expert has no rows on the rank."""
        num_experts, num_ranks = self.rows_PEQ.shape[1:]
        num_local, num_clones = num_experts // num_ranks, self.clones_Qc.shape[1]
        experts_E = torch.arange(num_experts, device=self.clones_Qc.device)
        ranks_Q = torch.arange(num_ranks, device=self.clones_Qc.device)
        unused_last_Qc = torch.where(self.clones_Qc < 0, num_experts, self.clones_Qc)
        order_EQ = torch.searchsorted(unused_last_Qc, experts_E.repeat(num_ranks, 1)).T
        local_EQ = torch.where(
            experts_E[:, None] // num_local == ranks_Q, experts_E[:, None] % num_local, num_local + order_EQ
        )
        return local_EQ + ranks_Q * (num_local + num_clones)

    @property
    def counts_PQs(self) -> Tensor:
        """Number of rows from source p in each slot of rank q, int64 [P, Q, E / Q + c]."""
        num_sources, num_experts, num_ranks = self.rows_PEQ.shape
        own_PQe = self.rows_PEQ.view(num_sources, num_ranks, -1, num_ranks).diagonal(dim1=1, dim2=3).transpose(1, 2)
        used_Qc = self.clones_Qc >= 0
        index_PcQ = self.clones_Qc.clamp(min=0).T.expand(num_sources, -1, -1)
        cloned_PQc = self.rows_PEQ.gather(1, index_PcQ).transpose(1, 2) * used_Qc
        return torch.cat([own_PQe, cloned_PQc], dim=2)


def place_clones(counts_PE: Tensor, num_ranks: int, num_clones: int, tolerance: int = 0) -> ClonePlacement:
    """Distributes the rows of all source ranks over the experts and their clones.

    1. Rows beyond the mean over ranks are the spill of their home rank; it consists of rows of its busiest experts.
       Ranks below the mean have spare rows.
    2. Experts with spill and ranks with spare rows are sorted in descending order. Both form consecutive intervals, and
       an overlap of the intervals of expert x and rank q moves that many rows of x to q (one-shot greedy).
    3. A rank keeps its `num_clones` largest clones. The rows of the others stay at home.
    4. The smallest clones of a home rank are removed as long as its rows stay within (100 + `tolerance`) % of the mean.
    5. The rows of an expert are assigned to ranks in the order of the source ranks, starting with the home rank for
       both, so that a rank processes many of its own tokens.

    Args:
        counts_PE: rows from each source rank to each expert, int64, sources by etp rank, then by ep rank.
        num_ranks: ep ranks.
        num_clones: clones per rank.
        tolerance: see step 4, in percent.
    """
    num_experts = counts_PE.shape[1]
    load_E = counts_PE.sum(dim=0)
    load_Qe = load_E.view(num_ranks, -1)
    load_Q = load_Qe.sum(dim=1)
    mean = (load_E.sum() + num_ranks - 1) // num_ranks
    moved_EQ = _matched(_spill(load_Qe, mean).flatten(), (mean - load_Q).clamp(min=0))
    largest_EQ, order_EQ = moved_EQ.sort(dim=0, descending=True, stable=True)
    largest_EQ[num_clones:] = 0
    moved_EQ = torch.zeros_like(moved_EQ).scatter(0, order_EQ, largest_EQ)
    moved_EQ = _reclaimed(moved_EQ, load_Q, mean * (100 + tolerance) // 100)
    experts_E1 = torch.arange(num_experts, device=counts_PE.device)[:, None]
    used_EQ = torch.where(moved_EQ > 0, experts_E1, num_experts).sort(dim=0).values[:num_clones]
    clones_Qc = torch.where(used_EQ < num_experts, used_EQ, -1).T.contiguous()
    home_E1 = experts_E1 // (num_experts // num_ranks)
    rows_EQ = moved_EQ.scatter(1, home_E1, (load_E - moved_EQ.sum(dim=1))[:, None])
    return ClonePlacement(_split_over_sources(counts_PE, rows_EQ, home_E1), clones_Qc)


def _spill(load_Qe: Tensor, mean: Tensor) -> Tensor:
    """Rows of each expert beyond the mean rows of a rank, [Q, e]: the last rows if experts are sorted by load."""
    sorted_Qe, order_Qe = load_Qe.sort(dim=1, stable=True)
    spill_Qe = torch.minimum((sorted_Qe.cumsum(dim=1) - mean).clamp(min=0), sorted_Qe)
    return torch.zeros_like(load_Qe).scatter(1, order_Qe, spill_Qe)


def _matched(spill_E: Tensor, spare_Q: Tensor) -> Tensor:
    """Rows [E, Q] that each expert moves to each rank: overlaps of the intervals of spill and spare rows."""
    (spill, by_spill), (spare, by_spare) = (x.sort(descending=True, stable=True) for x in (spill_E, spare_Q))
    overlap = _overlaps(spill[None], spare[None])[0]
    inverse_E, inverse_Q = by_spill.argsort(), by_spare.argsort()
    return overlap[inverse_E][:, inverse_Q]


def _overlaps(first_NI: Tensor, second_NJ: Tensor) -> Tensor:
    """Lengths [N, I, J] of the overlaps of two sequences of consecutive intervals with the given lengths."""
    first_ends, second_ends = first_NI.cumsum(dim=1)[:, :, None], second_NJ.cumsum(dim=1)[:, None]
    start = torch.maximum(first_ends - first_NI[:, :, None], second_ends - second_NJ[:, None])
    return (torch.minimum(first_ends, second_ends) - start).clamp(min=0)


def _reclaimed(moved_EQ: Tensor, load_Q: Tensor, most: Tensor) -> Tensor:
    """Removes the smallest clones of each home rank while its rows do not exceed `most`."""
    num_ranks = len(load_Q)
    moved_QN = moved_EQ.view(num_ranks, -1)
    slack_Q1 = (most - load_Q + moved_QN.sum(dim=1))[:, None]
    sorted_QN, order_QN = moved_QN.sort(dim=1, stable=True)
    kept_QN = torch.where(sorted_QN.cumsum(dim=1) <= slack_Q1, 0, sorted_QN)
    return torch.zeros_like(moved_QN).scatter(1, order_QN, kept_QN).view_as(moved_EQ)


def _split_over_sources(counts_PE: Tensor, rows_EQ: Tensor, home_E1: Tensor) -> Tensor:
    """Splits rows [E, Q] over source ranks: [P, E, Q]."""
    num_experts, num_ranks = rows_EQ.shape
    from_home_EQ = (home_E1 + torch.arange(num_ranks, device=rows_EQ.device)) % num_ranks
    counts_EQt = counts_PE.view(-1, num_ranks, num_experts).permute(2, 1, 0)
    num_etp = counts_EQt.shape[2]
    sources_EQt = counts_EQt.gather(1, from_home_EQ[:, :, None].expand(-1, -1, num_etp))
    split = _overlaps(sources_EQt.flatten(1), rows_EQ.gather(1, from_home_EQ))
    to_rank_EQ = from_home_EQ.argsort(dim=1)
    by_source = split.view(num_experts, num_ranks, num_etp, num_ranks)
    by_source = by_source.gather(1, to_rank_EQ[:, :, None, None].expand_as(by_source))
    by_source = by_source.gather(3, to_rank_EQ[:, None, None, :].expand_as(by_source))
    return by_source.permute(2, 1, 0, 3).flatten(0, 1)
