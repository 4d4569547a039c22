"""The planner of expert clones moves rows from overloaded ranks to others and loses none."""

import pytest
import torch
from torch import Tensor

from megatron_moe.moe.clone_placement import ClonePlacement, place_clones


def skewed(num_sources: int, num_experts: int, seed: int) -> Tensor:
    """Random row counts [P, E] of source ranks and experts: log-normal popularity of experts, and 10 % zeros."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.randn(num_experts, generator=generator).mul(1.5).exp()
    counts_PE = (torch.rand(num_sources, num_experts, generator=generator) * popularity_E * 40).long()
    return counts_PE * (torch.rand(num_sources, num_experts, generator=generator) > 0.1)


def load_of(placed: ClonePlacement) -> list[int]:
    """Number of rows that each rank processes."""
    return placed.rows_PEQ.sum(dim=(0, 1)).tolist()


def test_spill_of_the_busiest_expert_moves_to_the_rank_with_spare_rows() -> None:
    """Two ranks with two experts each have 14 and 6 rows, so 4 rows of expert 1, all from rank 1, move to rank 1."""
    placed = place_clones(torch.tensor([[1, 7, 2, 1], [1, 5, 2, 1]]), 2, 1)
    assert placed.clones_Qc.tolist() == [[-1], [1]]
    assert placed.rows_PEQ[:, 1].tolist() == [[7, 0], [1, 4]]
    assert placed.rows_PEQ[:, 0].tolist() == [[1, 0], [1, 0]] and placed.rows_PEQ[:, 2].tolist() == [[0, 2], [0, 2]]
    assert placed.counts_PQs.tolist() == [[[1, 7, 0], [2, 1, 0]], [[1, 1, 0], [2, 1, 4]]]
    assert placed.slots_EQ[1].tolist() == [1, 5] and placed.slots_EQ.diagonal().tolist()[0] == 0


def test_rows_of_the_home_rank_stay_at_home_on_every_rank() -> None:
    """Rows of an expert from its home rank move only after all rows from the rank with the clone.

    Six of 14 rows of expert 2 move to rank 0: all 5 rows from rank 0, and one of the 9 rows from its home rank 1.
    """
    placed = place_clones(torch.tensor([[1, 1, 5, 1], [1, 1, 9, 1]]), 2, 2)
    assert placed.clones_Qc.tolist() == [[2, -1], [-1, -1]]
    assert placed.rows_PEQ[:, 2].tolist() == [[5, 0], [1, 8]]
    assert load_of(placed) == [10, 10]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_ranks", "num_etp", "num_clones"), [(2, 1, 1), (4, 1, 2), (4, 2, 3), (8, 1, 8)])
def test_no_row_is_lost_and_no_rank_gets_fuller(num_ranks: int, num_etp: int, num_clones: int, seed: int) -> None:
    counts_PE = skewed(num_ranks * num_etp, 8 * num_ranks, seed)
    placed = place_clones(counts_PE, num_ranks, num_clones)
    rows_PEQ, counts_PQs = placed.rows_PEQ, placed.counts_PQs
    assert (rows_PEQ >= 0).all() and torch.equal(rows_PEQ.sum(dim=2), counts_PE)
    assert torch.equal(counts_PQs.sum(dim=2), rows_PEQ.sum(dim=1)), "slots hold the rows of their rank"
    before = counts_PE.sum(dim=0).view(num_ranks, -1).sum(dim=1)
    mean, most = -(-int(before.sum()) // num_ranks), int(before.max())
    assert mean <= max(load_of(placed)) < most
    if num_clones == 8:
        assert max(load_of(placed)) == mean, "enough slots for a balanced load"
    slots_EQ = placed.slots_EQ
    for rank, clones in enumerate(placed.clones_Qc.tolist()):
        used = [expert for expert in clones if expert >= 0]
        assert used == sorted(set(used)) and clones == used + [-1] * (num_clones - len(used))
        assert all(expert // 8 != rank and rows_PEQ[:, expert, rank].sum() > 0 for expert in used)
        own = range(8 * rank, 8 * rank + 8)
        in_order = [int(slots_EQ[expert, rank]) for expert in (*own, *used)]
        assert in_order == list(range(rank * (8 + num_clones), rank * (8 + num_clones) + len(in_order)))


def test_ranks_within_the_tolerance_have_no_clones() -> None:
    counts_PE = torch.tensor([[54, 50, 50, 46]] * 2)
    assert (place_clones(counts_PE, 2, 1, tolerance=5).clones_Qc == -1).all()
    assert (place_clones(counts_PE, 2, 1, tolerance=3).clones_Qc >= 0).any()


def test_small_clones_are_removed_first() -> None:
    """Rank 0 has 60 of 120 rows and would have 40 with two clones of its expert 1.

    Without the smaller clone it has 44 rows, which is within the tolerance of 10 %.
    """
    counts_PE = torch.zeros(3, 6, dtype=torch.int64)
    counts_PE[0] = torch.tensor([20, 40, 12, 12, 18, 18])
    exact, tolerant = place_clones(counts_PE, 3, 2), place_clones(counts_PE, 3, 2, tolerance=10)
    assert load_of(exact) == [40, 40, 40] and exact.clones_Qc.tolist() == [[-1, -1], [1, -1], [1, -1]]
    assert load_of(tolerant) == [44, 40, 36] and tolerant.clones_Qc.tolist() == [[-1, -1], [1, -1], [-1, -1]]


def test_shapes_do_not_depend_on_counts() -> None:
    """The planner runs on the meta device, where a host read or a data-dependent shape raises an error."""
    placed = place_clones(torch.zeros(4, 16, dtype=torch.int64, device="meta"), 4, 2, tolerance=5)
    assert placed.rows_PEQ.shape == (4, 16, 4) and placed.clones_Qc.shape == (4, 2)
    assert placed.slots_EQ.shape == (16, 4) and placed.counts_PQs.shape == (4, 4, 6)
