"""Rows of a routing: both forms, with and without capacity; and who owns which row."""

import pytest
import torch

from megatron_moe.kernels import reference
from megatron_moe.moe.token_dispatcher.base import expert_of_rows, index_rows
from tests.helpers.tolerances import EXACT
from tests.moe.routings import dense, sparse

KERNELS = reference.bundle()
IDS = [[2, 0], [2, -1], [-1, -1], [0, 2]]
PROBS = torch.tensor([[0.7, 0.3], [0.9, 9.0], [9.0, 9.0], [0.2, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize("make", [sparse, dense])
def test_rows_are_sorted_by_expert_and_carry_their_probability(make) -> None:
    index, probs = index_rows(make(IDS, PROBS, num_experts=4), KERNELS)
    held = index.offsets_E[-1]
    EXACT.check(index.token_R[:held], [0, 3, 0, 1, 3], "tokens")
    EXACT.check(probs[:held], torch.tensor([0.3, 0.2, 0.7, 0.9, 0.8], dtype=torch.float64), "probabilities")
    EXACT.check(index.offsets_E, [2, 2, 5, 5], "offsets")
    assert not probs[held:].any() and (index.token_R[held:] == -1).all()


@pytest.mark.parametrize("make", [sparse, dense])
def test_padded_to_capacity_every_expert_has_as_many_rows(make) -> None:
    index, probs = index_rows(make(IDS, PROBS, num_experts=4, capacity=3), KERNELS)
    EXACT.check(index.token_R, [0, 3, -1, -1, -1, -1, 0, 1, 3, -1, -1, -1], "tokens")
    EXACT.check(index.offsets_E, [3, 6, 9, 12], "offsets")
    EXACT.check(probs[[0, 1, 6, 7, 8]], torch.tensor([0.3, 0.2, 0.7, 0.9, 0.8], dtype=torch.float64), "probabilities")
    assert not probs[index.token_R == -1].any()


def test_the_number_of_rows_is_known_before_the_routing_is() -> None:
    none, everything = [[-1, -1]] * 4, [[0, 1]] * 4
    for capacity, rows in ((None, 8), (3, 12)):
        for ids in (none, everything):
            index, _ = index_rows(sparse(ids, num_experts=4, capacity=capacity), KERNELS)
            assert len(index.token_R) == rows


def test_every_row_knows_its_expert_and_rows_past_the_end_belong_to_none() -> None:
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    EXACT.check(expert_of_rows(offsets, 7), [1, 1, 3, 3, 3, 4, 4])
    EXACT.check(expert_of_rows(offsets, 0), torch.zeros(0, dtype=torch.int64))
