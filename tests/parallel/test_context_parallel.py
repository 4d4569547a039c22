"""Context parallelism: positions per rank, ring exchange, and all-to-all of heads."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import (
    Ring,
    SequencePart,
    gather_heads,
    merged_chunks,
    order_by_position,
    order_by_rank,
    pack_keys_values,
    scatter_heads,
    smallest_cp_degree,
    split_positions,
    unpack_keys_values,
)
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tiny_models import randn
from tests.helpers.tolerances import EXACT


def test_zigzag_pairs_early_with_late_chunks_and_contiguous_does_not() -> None:
    assert split_positions("zigzag", 8, 2) == ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    assert split_positions("contiguous", 6, 3) == ((range(0, 2),), (range(2, 4),), (range(4, 6),))
    with pytest.raises(AssertionError, match="10 tokens cannot be divided into 4 equal chunks"):
        split_positions("zigzag", 10, 2)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_position_is_on_one_rank_and_rows_can_be_sorted_and_restored(num_ranks: int, split: str) -> None:
    positions = torch.arange(48)
    parts = split_positions(split, 48, num_ranks)
    taken = [SequencePart(parts, rank).select(positions[None])[0] for rank in range(num_ranks)]
    assert len({len(part) for part in taken}) == 1
    assert torch.equal(order_by_position(torch.cat(taken), parts), positions)
    assert torch.equal(order_by_rank(positions, parts), torch.cat(taken))


@pytest.mark.parametrize(
    ("longest", "limit", "num_sequences", "num_ranks", "degree"),
    [
        (8, 8, 4, 4, 1),
        (9, 8, 4, 4, 2),
        (16, 8, 4, 4, 2),
        (17, 8, 4, 4, 4),
        (1000, 8, 4, 4, 4),  # the degree is at most the number of ranks
        (8, 8, 2, 4, 2),  # two sequences cannot use four groups of one rank
        (8, 8, 1, 4, 4),
        (8, 8, 6, 4, 2),
        (8, 8, 3, 1, 1),
    ],
)
def test_the_degree_is_the_smallest_that_fits_the_longest_document(
    longest: int, limit: int, num_sequences: int, num_ranks: int, degree: int
) -> None:
    assert smallest_cp_degree(longest, limit, num_sequences, num_ranks) == degree


def test_groups_of_dynamic_context_parallelism_share_the_sequences() -> None:
    x_BS = torch.arange(4 * 8).view(4, 8)
    parts = split_positions("zigzag", 8, 2)
    taken = [SequencePart(parts, rank, group="cp_2", share=(group, 2)) for group in (0, 1) for rank in (0, 1)]
    assert taken[3].select(x_BS).tolist() == x_BS[2:, 2:6].tolist()
    assert taken[0].select_sequences(x_BS).tolist() == x_BS[:2].tolist()
    assert torch.equal(torch.cat([part.select(x_BS).flatten() for part in taken]).sort().values, x_BS.flatten())
    assert taken[0].num_parts == 4


def test_adjacent_zigzag_ranks_form_a_coarser_zigzag_rank() -> None:
    fine, coarse = split_positions("zigzag", 32, 4), split_positions("zigzag", 32, 2)
    assert merged_chunks(fine[:2]) == coarse[0]
    assert merged_chunks(fine[2:]) == merged_chunks(coarse[1:]) == (range(8, 24),)
    assert merged_chunks(fine) == (range(32),)


def cp(size: int) -> ParallelConfig:
    return ParallelConfig(world_size=size, cp=size)


def circulated(ctx: ParallelContext) -> list[tuple[int, float, float]]:
    rank = ctx.group("cp").rank
    k_SBGD, v_SBGE = torch.full((2, 1, 2, 3), float(rank)), torch.full((2, 1, 2, 4), 10.0 * rank)
    found = Ring(ctx.group("cp")).circulate(k_SBGD, v_SBGE)
    return [(source, k.mean().item(), v.mean().item()) for source, (k, v) in found]


@pytest.mark.parametrize(("run", "size"), [(on_threads, 2), (on_threads, 3), (on_threads, 4), (on_processes, 4)])
def test_the_ring_yields_the_tensors_of_every_rank_once(run, size: int) -> None:
    for rank, seen in enumerate(run(cp(size), circulated)):
        sources = [(rank - step) % size for step in range(size)]
        assert seen == [(source, source, 10.0 * source) for source in sources]


def test_a_ring_of_one_rank_yields_its_own_tensors() -> None:
    k_SBGD, v_SBGE = randn(2, 1, 2, 3), randn(2, 1, 2, 4, seed=2)
    ((source, (k, v)),) = Ring(None).circulate(k_SBGD, v_SBGE)
    assert source == 0 and k is k_SBGD and v is v_SBGE


def test_a_rank_sends_to_the_next_rank_only_and_may_send_an_empty_vector() -> None:
    def on_rank(ctx: ParallelContext) -> tuple[float, int]:
        ring = Ring(ctx.group("cp"))
        return ring.send_to_next(torch.full((1,), float(ctx.rank)))().item(), len(ring.send_to_next(torch.empty(0))())

    assert on_threads(cp(3), on_rank) == [(2.0, 0), (0.0, 0), (1.0, 0)]


def test_packed_keys_and_values_are_restored() -> None:
    k_SBGD, v_SBGE = randn(5, 2, 2, 3), randn(5, 2, 2, 4, seed=2)
    for out, x in zip(unpack_keys_values(pack_keys_values(k_SBGD, v_SBGE), 3), (k_SBGD, v_SBGE), strict=True):
        EXACT.check(out, x)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scatter_and_gather_of_heads_are_inverse_and_each_is_the_backward_of_the_other(size: int) -> None:
    x, grad = randn(4 * size, 2, 8, 3), randn(4 * size, 2, 8, 3, seed=4)

    def on_rank(ctx: ParallelContext) -> tuple[Tensor, ...]:
        group = ctx.group("cp")
        positions, heads = (
            x.chunk(size, dim=dim)[group.rank].clone().requires_grad_() for dim in (0, 2)
        )  # all heads at this rank's positions, and this rank's heads at all positions
        scattered, gathered = scatter_heads(positions, group), gather_heads(heads, group)
        scattered.backward(grad.chunk(size, dim=2)[group.rank])
        gathered.backward(grad.chunk(size)[group.rank])
        return scattered.detach(), heads.grad, gathered.detach(), positions.grad

    for rank, found in enumerate(on_threads(cp(size), on_rank)):
        expected = [each.chunk(size, dim=dim)[rank] for dim, each in ((2, x), (2, grad), (0, x), (0, grad))]
        for tensor, like in zip(found, expected, strict=True):
            EXACT.check(tensor, like, f"rank {rank}")
