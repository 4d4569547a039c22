"""Which places a context-parallel rank holds."""

import pytest
import torch

from megatron_moe.parallel.sequence_split import SequencePart, by_rank, in_order, joined, split_places


def test_zigzag_pairs_early_with_late_chunks() -> None:
    assert split_places("zigzag", 8, 2) == ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))


def test_contiguous_gives_neighbouring_places() -> None:
    assert split_places("contiguous", 6, 3) == ((range(0, 2),), (range(2, 4),), (range(4, 6),))


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_one_rank_holds_everything_in_order(split: str) -> None:
    assert split_places(split, 7, 1) == ((range(7),),)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_place_is_on_one_rank(num_ranks: int, split: str) -> None:
    parts = split_places(split, 48, num_ranks)
    assert sorted(place for chunks in parts for chunk in chunks for place in chunk) == list(range(48))
    assert len({sum(map(len, chunks)) for chunks in parts}) == 1


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="a sequence of 10 tokens is not 4 equal chunks"):
        split_places("zigzag", 10, 2)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parts_come_back_in_order_and_apart(num_ranks: int, split: str) -> None:
    places = torch.arange(24)
    parts = split_places(split, 24, num_ranks)
    taken = torch.cat([SequencePart(parts, rank).take(places[None])[0] for rank in range(num_ranks)])
    assert torch.equal(in_order(taken, parts), places)
    assert torch.equal(by_rank(places, parts), taken)


def test_a_group_of_zigzag_neighbours_is_a_zigzag_rank() -> None:
    fine, coarse = split_places("zigzag", 32, 4), split_places("zigzag", 32, 2)
    assert joined(fine[:2]) == coarse[0]
    assert joined(fine[2:]) == joined(coarse[1:]) == (range(8, 24),)
    assert joined(fine) == (range(32),)
