"""What goes round the ring, and heads exchanged for places."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import Ring, gather_heads, pack, scatter_heads, unpack
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tiny_models import randn
from tests.helpers.tolerances import EXACT


def cp(size: int) -> ParallelConfig:
    return ParallelConfig(world_size=size, cp=size)


def go_round(ctx: ParallelContext) -> list[tuple[int, float, float]]:
    rank = ctx.group("cp").rank
    tensors = (torch.full((2, 3), float(rank)), torch.full((4,), 10.0 * rank))
    return [(source, a.mean().item(), b.mean().item()) for source, (a, b) in Ring(ctx.group("cp")).circulate(tensors)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ring_brings_the_tensors_of_every_rank_once(size: int) -> None:
    for rank, seen in enumerate(on_threads(cp(size), go_round)):
        sources = [(rank - step) % size for step in range(size)]
        assert seen == [(source, source, 10.0 * source) for source in sources]


def test_processes_have_the_same_ring() -> None:
    assert on_processes(cp(4), go_round) == on_threads(cp(4), go_round)


def test_a_rank_alone_sees_its_own() -> None:
    x = randn(3)
    ((source, (seen,)),) = Ring(None).circulate((x,))
    assert source == 0 and torch.equal(seen, x)
    assert Ring(None).pass_on(x)() is x


def test_what_is_passed_on_all_the_way_comes_home() -> None:
    def on_rank(ctx: ParallelContext) -> float:
        flat, ring = torch.full((3,), float(ctx.rank)), Ring(ctx.group("cp"))
        for _ in range(4):
            flat = ring.pass_on(flat)()
        return flat.mean().item()

    assert on_threads(cp(4), on_rank) == [0.0, 1.0, 2.0, 3.0]


def test_a_rank_sends_to_its_neighbour_only() -> None:
    """An empty vector, too, goes round."""

    def on_rank(ctx: ParallelContext) -> tuple[float, int]:
        ring = Ring(ctx.group("cp"))
        return ring.pass_on(torch.full((1,), float(ctx.rank)))().item(), len(ring.pass_on(torch.empty(0))())

    assert on_threads(cp(3), on_rank) == [(2.0, 0), (0.0, 0), (1.0, 0)]


def test_packed_tensors_come_apart_again() -> None:
    tensors = [randn(2, 3), randn(0, 4), randn(5, seed=2)]
    for out, x in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        EXACT.check(out, x)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scattered_heads_have_all_places_rank_by_rank(size: int) -> None:
    x = randn(4 * size, 2, 8, 3)

    def on_rank(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        group = ctx.group("cp")
        shares = scatter_heads(x.chunk(size)[group.rank], group)
        return shares, gather_heads(shares, group)

    for rank, (shares, back) in enumerate(on_threads(cp(size), on_rank)):
        EXACT.check(shares, x.chunk(size, dim=2)[rank])
        EXACT.check(back, x.chunk(size)[rank])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_of_scattered_heads_are_gathered(size: int) -> None:
    x, grad = randn(2 * size, 1, 4, 3), randn(2 * size, 1, 4, 3, seed=4)

    def on_rank(ctx: ParallelContext) -> tuple[Tensor | None, Tensor | None]:
        group = ctx.group("cp")
        there, back = x.chunk(size)[group.rank].requires_grad_(), x.chunk(size, dim=2)[group.rank].requires_grad_()
        scatter_heads(there, group).backward(grad.chunk(size, dim=2)[group.rank])
        gather_heads(back, group).backward(grad.chunk(size)[group.rank])
        return there.grad, back.grad

    for rank, (there, back) in enumerate(on_threads(cp(size), on_rank)):
        EXACT.check(there, grad.chunk(size)[rank])
        EXACT.check(back, grad.chunk(size, dim=2)[rank])
