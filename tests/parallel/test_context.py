"""Ranks, groups and collectives."""

import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.collectives import (
    all_gather_flat,
    all_reduce_,
    broadcast_,
    gather_objects,
    reduce_scatter_flat,
)
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads


def test_one_rank_needs_no_process_group():
    context = ParallelContext.single()
    assert context.group("dp").size == 1
    assert all_reduce_(torch.ones(2), context.group("dp")).tolist() == [1, 1]
    assert gather_objects("a", context.group("world")) == ["a"]


def test_collectives_combine_over_the_data_parallel_group():
    def rank_main(context):
        group = context.group("dp")
        mine = torch.arange(4, dtype=torch.float64) + 10 * group.rank
        summed = all_reduce_(mine.clone(), group)
        largest = all_reduce_(mine.clone(), group, "max")
        shard = reduce_scatter_flat(torch.empty(2, dtype=torch.float64), mine, group)
        full = all_gather_flat(torch.empty(4, dtype=torch.float64), mine[:2].clone(), group)
        first = broadcast_(mine.clone(), group, source=1)
        return [t.tolist() for t in (summed, largest, shard, full, first)]

    results = on_threads(ParallelConfig(world_size=2), rank_main)
    expected = [[10, 12, 14, 16], [10, 11, 12, 13], None, [0, 1, 10, 11], [10, 11, 12, 13]]
    for rank, result in enumerate(results):
        expected[2] = [[10, 12], [14, 16]][rank]
        assert result == expected


def test_groups_of_both_grids_are_built_on_every_rank():
    def rank_main(context):
        return {name: context.group(name).ranks for name in ("tp", "dp", "ep", "edp")}

    results = on_threads(ParallelConfig(world_size=4, tp=2, ep=4), rank_main)
    assert results[3] == {"tp": (2, 3), "dp": (1, 3), "ep": (0, 1, 2, 3), "edp": (3,)}


def test_an_error_on_one_rank_reaches_the_caller():
    def rank_main(context):
        if context.rank == 1:
            raise ValueError("rank 1 is ill")
        all_reduce_(torch.ones(1), context.group("dp"))

    try:
        on_threads(ParallelConfig(world_size=2), rank_main)
    except Exception as error:
        assert "rank 1 is ill" in str(error)
    else:
        raise AssertionError("no error reached the caller")
