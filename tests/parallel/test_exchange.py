"""Exchanges of rows equal, in forward and backward, the result on one rank that has all rows."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel import exchange
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import AllGather, AllToAll, ReduceScatter
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

WIDTH = 3
COUNTS = (
    ("even", [[2, 2, 2]] * 3),
    ("uneven", [[1, 4, 2], [3, 0, 5], [2, 2, 1]]),
    ("one rank sends nothing", [[0, 0, 0], [1, 2, 3], [4, 0, 1]]),
    ("one rank receives nothing", [[2, 0, 1], [3, 0, 2], [1, 0, 1]]),
    ("all to one rank", [[0, 0, 4], [0, 0, 3], [0, 0, 5]]),
    ("one row in all", [[0, 0, 0], [0, 0, 1], [0, 0, 0]]),
    ("nothing at all", [[0, 0, 0]] * 3),
)
EVERY_COUNT = pytest.mark.parametrize("counts", [c for _, c in COUNTS], ids=[name for name, _ in COUNTS])
SIZES = ([2, 2, 2], [3, 0, 1], [0, 0, 4], [1, 1, 1], [0, 0, 0])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_three(exchange_of, inputs: list[Tensor], pushes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Runs an exchange on three ranks; returns each rank's output and input gradient."""

    def rank(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        rows = inputs[ctx.rank].clone().requires_grad_()
        out = exchange.run_exchange(exchange_of(ctx), rows)
        out.backward(pushes[ctx.rank])
        return out.detach(), rows.grad

    return on_threads(ParallelConfig(world_size=3, ep=3), rank)


@EVERY_COUNT
def test_all_to_all_sends_every_row_and_returns_every_gradient(counts) -> None:
    inputs = [draw(sum(row), WIDTH, seed=r) for r, row in enumerate(counts)]
    columns = [list(column) for column in zip(*counts, strict=True)]
    pushes = [draw(sum(column), WIDTH, seed=10 + r) for r, column in enumerate(columns)]
    results = on_three(
        lambda ctx: AllToAll(ctx.group("ep"), tuple(counts[ctx.rank]), tuple(columns[ctx.rank])), inputs, pushes
    )
    sent = [rows.split(row) for rows, row in zip(inputs, counts, strict=True)]
    returned = [push.split(column) for push, column in zip(pushes, columns, strict=True)]
    for r, (out, grad) in enumerate(results):
        EXACT.check(out, torch.cat([sent[source][r] for source in range(3)]), f"rows of rank {r}")
        EXACT.check(grad, torch.cat([returned[target][r] for target in range(3)]), f"gradient of rank {r}")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_gather_gives_every_rank_all_rows_and_sums_their_gradients(sizes) -> None:
    inputs = [draw(size, WIDTH, seed=r) for r, size in enumerate(sizes)]
    pushes = [draw(sum(sizes), WIDTH, seed=10 + r) for r in range(3)]
    results = on_three(lambda ctx: AllGather(ctx.group("ep"), tuple(sizes)), inputs, pushes)
    for r, (out, grad) in enumerate(results):
        EXACT.check(out, torch.cat(inputs), f"rows of rank {r}")
        FP64_LAYOUT.check(grad, sum(pushes).split(sizes)[r], f"gradient of rank {r}")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reduce_scatter_gives_every_rank_its_part_of_the_sum_and_gathers_gradients(sizes) -> None:
    inputs = [draw(sum(sizes), WIDTH, seed=r) for r in range(3)]
    pushes = [draw(size, WIDTH, seed=10 + r) for r, size in enumerate(sizes)]
    results = on_three(lambda ctx: ReduceScatter(ctx.group("ep"), tuple(sizes)), inputs, pushes)
    for r, (out, grad) in enumerate(results):
        FP64_LAYOUT.check(out, sum(inputs).split(sizes)[r], f"rows of rank {r}")
        EXACT.check(grad, torch.cat(pushes), f"gradient of rank {r}")


@pytest.mark.parametrize("kind", [AllToAll, AllGather, ReduceScatter])
def test_equal_parts_need_no_sizes_and_vectors_are_exchanged_like_rows(kind) -> None:
    def rank(ctx: ParallelContext) -> list[tuple[Tensor, Tensor]]:
        group, size = ctx.group("ep"), 6 if kind is AllGather else 2
        results = []
        for each in (kind(group), kind(group, *[(size,) * 3] * (2 if kind is AllToAll else 1))):
            values = draw(6, seed=ctx.rank).requires_grad_()
            out = exchange.run_exchange(each, values)
            (out * torch.arange(len(out))).sum().backward()
            results.append((out.detach(), values.grad))
        return results

    for without_sizes, with_sizes in on_threads(ParallelConfig(world_size=3, ep=3), rank):
        EXACT.check(without_sizes[0], with_sizes[0], "values")
        EXACT.check(without_sizes[1], with_sizes[1], "gradient")


def test_integers_are_exchanged_without_gradients() -> None:
    def rank(ctx: ParallelContext) -> Tensor:
        return exchange.run_exchange(AllGather(ctx.group("ep")), torch.full((2,), ctx.rank))

    assert [ids.tolist() for ids in on_threads(ParallelConfig(world_size=2, ep=2), rank)] == [[0, 0, 1, 1]] * 2


def test_sums_over_ranks_are_computed_in_fp32_at_least() -> None:
    """1 + 3 * 2^-9 exceeds 1 in bf16 if it is rounded once, but not if each of the additions is rounded."""

    def rank(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        value = 1.0 if ctx.rank == 0 else 2.0**-9
        rows = torch.full((4, 1), value, dtype=torch.bfloat16)
        summed = exchange.run_exchange(ReduceScatter(ctx.group("ep")), rows)
        leaf = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        exchange.run_exchange(AllGather(ctx.group("ep")), leaf).backward(rows)
        return summed, leaf.grad

    expected = torch.tensor([[1 + 3 * 2.0**-9]]).bfloat16()
    assert expected.item() > 1
    for summed, grad in on_threads(ParallelConfig(world_size=4, ep=4), rank):
        assert summed.dtype is torch.bfloat16
        EXACT.check(summed, expected, "sum")
        EXACT.check(grad, expected, "sum of gradients")


def test_work_between_start_and_finish_overlaps_in_forward_and_backward() -> None:
    def rank(ctx: ParallelContext) -> tuple[list[str], Tensor]:
        done: list[str] = []

        class Work(torch.autograd.Function):
            @staticmethod
            def forward(work, x):
                done.append("work")
                return x * 2

            @staticmethod
            def backward(work, grad):
                done.append("work back")
                return grad * 2

        class Loud(AllToAll):
            def launch(self, rows):
                done.append("launch")
                wait = super().launch(rows)
                return lambda: done.append("wait") or wait()

            transposed = property(lambda self: self)

        leaf = draw(2, WIDTH, seed=ctx.rank).requires_grad_()
        pending = exchange.start_exchange(Loud(ctx.group("ep")), leaf * 1)
        other = Work.apply(leaf)
        (pending.finish() + other).sum().backward()
        return done, leaf.grad

    for done, grad in on_threads(ParallelConfig(world_size=2, ep=2), rank):
        assert done == ["launch", "work", "wait", "launch", "work back", "wait"]
        EXACT.check(grad, torch.full((2, WIDTH), 3.0, dtype=torch.float64))


def test_backward_can_be_repeated_on_one_graph() -> None:
    def rank(ctx: ParallelContext) -> Tensor:
        leaf = draw(2, WIDTH, seed=ctx.rank).requires_grad_()
        out = exchange.run_exchange(AllToAll(ctx.group("ep")), leaf).sum()
        out.backward(retain_graph=True)
        out.backward()
        return leaf.grad

    for grad in on_threads(ParallelConfig(world_size=2, ep=2), rank):
        EXACT.check(grad, torch.full((2, WIDTH), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("kind", [AllToAll, AllGather, ReduceScatter])
def test_over_one_rank_nothing_is_communicated_or_copied(kind) -> None:
    rows = draw(4, WIDTH, seed=0)
    assert exchange.run_exchange(kind(ParallelContext.single().group("ep")), rows) is rows


def test_sizes_that_do_not_fit_the_rows_are_rejected() -> None:
    def rank(ctx: ParallelContext) -> None:
        exchange.run_exchange(AllToAll(ctx.group("ep"), (1, 2), (1, 2)), draw(4, WIDTH, seed=0))

    with pytest.raises(AssertionError, match="got 4 rows, but the sizes are"):
        on_threads(ParallelConfig(world_size=2, ep=2), rank)
