"""Which places a context-parallel rank holds."""

import pytest
import torch

from megatron_moe.parallel.context_parallel import SequencePart, by_rank, fewest_ranks, in_order, joined, split_places


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


@pytest.mark.parametrize(
    ("longest", "limit", "num_sequences", "num_ranks", "degree"),
    [
        (8, 8, 4, 4, 1),
        (9, 8, 4, 4, 2),
        (16, 8, 4, 4, 2),
        (17, 8, 4, 4, 4),
        (1000, 8, 4, 4, 4),  # never over more ranks than there are
        (8, 8, 2, 4, 2),  # two sequences for four groups of one
        (8, 8, 1, 4, 4),
        (8, 8, 6, 4, 2),
        (8, 8, 3, 1, 1),
    ],
)
def test_the_fewest_ranks_hold_the_longest_document(
    longest: int, limit: int, num_sequences: int, num_ranks: int, degree: int
) -> None:
    assert fewest_ranks(longest, limit, num_sequences, num_ranks) == degree


def test_groups_share_the_sequences() -> None:
    x_BS = torch.arange(4 * 8).view(4, 8)
    parts = split_places("zigzag", 8, 2)
    taken = [SequencePart(parts, rank, group="cp_2", share=(group, 2)) for group in (0, 1) for rank in (0, 1)]
    assert taken[3].take(x_BS).tolist() == x_BS[2:, 2:6].tolist()
    assert taken[0].sequences(x_BS).tolist() == x_BS[:2].tolist()
    assert torch.equal(torch.cat([part.take(x_BS).flatten() for part in taken]).sort().values, x_BS.flatten())
    assert taken[0].num_parts == 4


def test_a_group_of_zigzag_neighbours_is_a_zigzag_rank() -> None:
    fine, coarse = split_places("zigzag", 32, 4), split_places("zigzag", 32, 2)
    assert joined(fine[:2]) == coarse[0]
    assert joined(fine[2:]) == joined(coarse[1:]) == (range(8, 24),)
    assert joined(fine) == (range(32),)
