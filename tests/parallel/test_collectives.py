"""Collectives, synchronous and asynchronous, equal sums and concatenations of all ranks' tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.collectives import (
    PendingCollective,
    all_gather_flat,
    all_reduce_,
    broadcast_,
    gather_objects,
    reduce_scatter_flat,
    shard_of,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import EXACT

SIZES = (1, 2, 3, 4)


def given(rank: int, size: int) -> Tensor:
    """Input of a rank: random integers in fp64, so that sums are exact in any order."""
    source = torch.Generator().manual_seed(rank)
    return 12.0 * torch.randint(-50, 50, (6 * size,), generator=source).double()


def total(size: int) -> Tensor:
    return torch.stack([given(rank, size) for rank in range(size)]).sum(0)


def unequal(size: int) -> list[int]:
    """Returns unequal shard sizes of the tensor from `given`; with several ranks, the first shard is empty."""
    return [0, *[5] * (size - 2), 6 * size - 5 * (size - 2)] if size > 1 else [6]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_sums_and_means_are_computed_in_place(size: int, mean: bool, equal: bool) -> None:
    sizes = None if equal else unequal(size)

    def reduced(context: ParallelContext) -> tuple[Tensor, Tensor, Tensor]:
        group = context.group("world")
        everywhere, scattered = given(context.rank, size), given(context.rank, size)
        wide = given(context.rank, size).float()
        for pending in (
            start_all_reduce_(everywhere, group, mean=mean),
            start_reduce_scatter_(scattered, group, sizes=sizes, mean=mean),
            start_reduce_scatter_(wide, group, sizes=sizes, mean=mean, fp32_sums=True),
        ):
            pending.wait()
        return everywhere, shard_of(scattered, group, sizes).clone(), shard_of(wide, group, sizes).clone()

    expected = total(size) / (size if mean else 1)
    parts = expected.split(sizes or [6] * size)
    for rank, (everywhere, part, wide) in enumerate(on_threads(ParallelConfig(world_size=size), reduced)):
        EXACT.check(everywhere, expected, f"all-reduce on rank {rank}")
        EXACT.check(part, parts[rank], f"reduce-scatter on rank {rank}")
        EXACT.check(wide, parts[rank].float(), f"reduce-scatter in fp32 on rank {rank}")


@pytest.mark.parametrize("size", SIZES)
def test_collectives_accept_empty_tensors(size: int) -> None:
    def rank(context: ParallelContext) -> list[int]:
        flats = [torch.empty(0) for _ in range(3)]
        for start, flat in zip((start_all_reduce_, start_reduce_scatter_, start_all_gather_), flats, strict=True):
            start(flat, context.group("world")).wait()
        return [flat.numel() for flat in flats]

    assert on_threads(ParallelConfig(world_size=size), rank) == [[0, 0, 0]] * size


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_brings_every_shard_to_every_rank(size: int, equal: bool) -> None:
    sizes, expected = None if equal else unequal(size), given(0, size)

    def gathered(context: ParallelContext) -> Tensor:
        group = context.group("world")
        flat = torch.full((6 * size,), torch.nan, dtype=torch.float64)
        shard_of(flat, group, sizes).copy_(shard_of(expected, group, sizes))
        start_all_gather_(flat, group, sizes).wait()
        return flat

    for rank, flat in enumerate(on_threads(ParallelConfig(world_size=size), gathered)):
        EXACT.check(flat, expected, f"rank {rank}")


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("size", SIZES)
def test_synchronous_collectives_equal_their_definitions(size: int, length: int) -> None:
    parts = [given(rank, size)[: length * size] for rank in range(size)]

    def rank(context: ParallelContext) -> dict[str, Tensor]:
        group, mine = context.group("world"), parts[context.rank]
        return {
            "sum": all_reduce_(mine.clone(), group),
            "max": all_reduce_(mine.clone(), group, "max"),
            "min": all_reduce_(mine.clone(), group, "min"),
            "part of the sum": reduce_scatter_flat(mine.new_empty(length), mine, group),
            "all": all_gather_flat(mine.new_empty(length * size * size), mine, group),
            "of the last": broadcast_(mine.clone(), group, source=size - 1),
            "objects": torch.stack(gather_objects(mine, group)),
        }

    stacked = torch.stack(parts)
    for number, found in enumerate(on_threads(ParallelConfig(world_size=size), rank)):
        expected = {
            "sum": stacked.sum(0),
            "max": stacked.amax(0),
            "min": stacked.amin(0),
            "part of the sum": stacked.sum(0)[number * length : (number + 1) * length],
            "all": stacked.flatten(),
            "of the last": parts[-1],
            "objects": stacked,
        }
        EXACT.check_all(found, expected, f"rank {number}")


def test_an_error_on_one_rank_reaches_the_caller() -> None:
    def rank(context: ParallelContext) -> None:
        if context.rank == 1:
            raise ValueError("rank 1 is ill")
        all_reduce_(torch.ones(1), context.group("dp"))

    with pytest.raises(Exception, match="rank 1 is ill"):
        on_threads(ParallelConfig(world_size=2), rank)


def test_emulated_reduce_scatter_writes_into_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[Tensor] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "fake")
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda out, *args, **options: outputs.append(out))
    flat = torch.zeros(6)
    start_reduce_scatter_(flat, ProcessGroup("dp", (0, 1), 1, None, flat.device))
    assert [out.data_ptr() for out in outputs] == [flat[3:].data_ptr()]


def _under_gloo(context: ParallelContext) -> list[Tensor]:
    """Launches several collectives and waits for them in a different order."""
    group: ProcessGroup = context.group("world")
    flats = [given(context.rank, group.size) for _ in range(3)]
    pending: list[PendingCollective] = [start_reduce_scatter_(flat, group) for flat in flats]
    for each in reversed(pending):
        each.wait()
    gathers = [start_all_gather_(flat, group) for flat in flats]
    for each in gathers:
        each.wait()
    last, sizes = given(context.rank, group.size), unequal(group.size)
    start_reduce_scatter_(last, group, sizes=sizes).wait()
    start_all_gather_(last, group, sizes).wait()
    return [*flats, last]


def test_gloo_processes_run_several_collectives_concurrently() -> None:
    for rank, flats in enumerate(on_processes(ParallelConfig(world_size=2), _under_gloo)):
        for flat in flats:
            EXACT.check(flat, total(2), f"reduced and gathered on rank {rank}")
