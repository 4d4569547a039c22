"""Reduce-scatter by copies between CPU ranks: rounds, unequal and empty shards, order of sums, late ranks."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.grid import all_groups, shards_span_hosts
from megatron_moe.parallel.peer_reduce import PeerReduce, receive_slot_bytes
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

SIZES = ((200, 200, 200), (0, 7, 650), (1, 0, 1))
"""Sizes of the shards of three ranks, per flat tensor."""


def contribution(rank: int, step: int) -> list[Tensor]:
    """Gradients of a rank, whose sums depend on the order."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(sum(sizes), generator=draw) * 10.0 ** (3 * rank) for sizes in SIZES]


def shard(flats: list[Tensor], rank: int) -> list[Tensor]:
    return [flat.split(list(sizes))[rank] for flat, sizes in zip(flats, SIZES, strict=True)]


@pytest.mark.parametrize(("most", "num_rounds"), [(2**20, 1), (2 * 1024, 5), (2, 9)])
def test_shards_are_summed_in_rank_order_in_as_many_rounds_as_the_slots_need(most: int, num_rounds: int) -> None:
    """Slots hold a whole shard, 1024 bytes, or the least size of 512 bytes."""

    def rank_main(context: ParallelContext) -> list[list[Tensor]]:
        group = context.group("dp_cp")
        peers = PeerReduce(receive_slot_bytes([SIZES], torch.float32, most), group, context)
        flats = contribution(group.rank, 0)
        rounds = peers.plan_rounds(flats, SIZES)
        assert len(rounds) == num_rounds
        found = []
        for step in range(3):
            for flat, values in zip(flats, contribution(group.rank, step), strict=True):
                flat.copy_(values)
            out = [torch.full_like(each, torch.nan) for each in shard(flats, group.rank)]
            for each in rounds:
                with peers.exchange_round(each):
                    for index, start, own, received in each.received:
                        part = out[index][start : start + len(own)]
                        reference.sum_contributions_(part, own, received, group.rank, accumulate=False)
            found.append(out)
        return found

    for rank, found in enumerate(on_threads(ParallelConfig(world_size=3), rank_main)):
        for step, out in enumerate(found):
            parts = zip(*(shard(contribution(peer, step), rank) for peer in range(3)), strict=True)
            for mine, (first, second, third) in zip(out, parts, strict=True):
                EXACT.check(mine, first + second + third)


def test_a_late_rank_is_named() -> None:
    def rank_main(context: ParallelContext) -> str:
        context.timeout_s = 0.2
        group = context.group("dp_cp")
        peers = PeerReduce(512, group, context)
        (only,) = peers.plan_rounds([torch.zeros(4)], [(2, 2)])
        if group.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as problem, peers.exchange_round(only):
            pass
        return str(problem.value)

    found, _ = on_threads(ParallelConfig(world_size=2), rank_main)
    assert found == "rank 1 did not exchange its gradients within 0.2 s"


@pytest.mark.parametrize("axes", [{}, {"cp": 2}, {"ep": 2}, {"ep": 4, "tp": 2}, {"pp": 2}, {"pp": 4, "ep": 2}])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("ranks_per_host", [None, 2, 4, 8])
def test_shards_span_hosts_if_a_group_does(axes: dict[str, int], instances: int, ranks_per_host: int | None) -> None:
    config = ParallelConfig(
        world_size=8, num_distributed_optimizer_instances=instances, ranks_per_host=ranks_per_host, **axes
    )
    if config.edp % instances or config.dp % instances:
        config = ParallelConfig(world_size=8, ranks_per_host=ranks_per_host, **axes)
    for name, experts in (("dp_cp", False), ("edp", True)):
        suffix = "_inner" if config.num_distributed_optimizer_instances > 1 else ""
        groups = all_groups(config)[f"{name}{suffix}"]
        hosts = [[rank // (ranks_per_host or 8) for rank in ranks] for ranks in groups]
        assert shards_span_hosts(config, experts=experts) == any(a != b for each in hosts for a, b in pairwise(each))
