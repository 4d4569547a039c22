"""Parallel folding: all legal folds of all world sizes up to 64 ranks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.grid import (
    ATTENTION_GROUPS,
    EXPERT_GROUPS,
    Grid,
    ParallelSizesError,
    all_groups,
    attention_grid,
    expert_grid,
)

WORLDS = range(1, 65)
NUM_FOLDS = 27_642
"""Number of pairs of attention grid and expert grid with the same number of stages, over all world sizes."""
Split = tuple[int, int, int]
"""Parallel sizes (tp, cp, pp) of an attention grid or (etp, ep, pp) of an expert grid."""


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def splits(world: int) -> Iterator[Split]:
    """Yields every split whose product divides the world size."""
    for pp in divisors(world):
        for first in divisors(world // pp):
            for second in divisors(world // pp // first):
                yield first, second, pp


def attention_of(world: int, split: Split) -> Grid:
    tp, cp, pp = split
    return attention_grid(ParallelConfig(world_size=world, tp=tp, cp=cp, pp=pp))


def experts_of(world: int, split: Split) -> Grid:
    etp, ep, pp = split
    return expert_grid(ParallelConfig(world_size=world, etp=etp, ep=ep, pp=pp))


def groups_of_box(sizes: dict[str, int], members: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Returns the groups over the axes `members` of a box of ranks, whose first axis in `sizes` varies fastest."""
    axes = [*reversed(sizes)]
    box = np.arange(prod(sizes.values())).reshape([sizes[axis] for axis in axes])
    inside = [place for place, axis in enumerate(axes) if axis in members]
    rows = np.moveaxis(box, inside, range(-len(inside), 0)).reshape(-1, prod(sizes[axis] for axis in members))
    return {tuple(row) for row in rows.tolist()}


def check_cover(config: ParallelConfig) -> None:
    """Checks that every rank is in exactly one group of each name."""
    everyone = list(range(config.world_size))
    for name, groups in all_groups(config).items():
        assert sorted(rank for group in groups for rank in group) == everyone, (name, config)


def test_dynamic_context_parallelism_has_groups_of_every_power_of_two():
    groups = all_groups(ParallelConfig(world_size=16, tp=2, cp=4, max_seqlen_per_dp_cp_rank=8))
    assert groups["cp_1"] == [(rank,) for rank in range(16)]
    assert groups["cp_2"][:2] == [(0, 2), (1, 3)] and len(groups["cp_2"]) == 8
    assert sorted(groups["cp_4"]) == sorted(groups["cp"])
    assert "cp_2" not in all_groups(ParallelConfig(world_size=16, tp=2, cp=4))
    with pytest.raises(ParallelSizesError, match="--context-parallel-size 3 is not a power of two"):
        all_groups(ParallelConfig(world_size=3, cp=3, max_seqlen_per_dp_cp_rank=8))


def test_levels_of_context_parallelism_are_neighbours_and_a_ring_between_them():
    groups = all_groups(ParallelConfig(world_size=8, cp=8, cp_sub_axes=(2, 4)))
    assert groups["cp_a2a"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["cp_p2p"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    with pytest.raises(ParallelSizesError, match="cp_a2a 2 x cp_p2p 2 is not the size 8 of axis cp"):
        all_groups(ParallelConfig(world_size=8, cp=8, cp_sub_axes=(2, 2)))


def test_expert_groups_are_divided_among_hosts():
    groups = all_groups(ParallelConfig(world_size=16, ep=8, ranks_per_host=4))
    assert groups["etp_ep_intra"] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert groups["etp_ep_inter"] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]


@pytest.mark.parametrize("ranks_per_host", [None, 4, 8, 16])
def test_expert_groups_on_one_host_have_no_ranks_on_others(ranks_per_host):
    config = ParallelConfig(world_size=16, ep=2, etp=2, ranks_per_host=ranks_per_host)
    groups = all_groups(config)
    assert groups["etp_ep_intra"] == groups["etp_ep"] and not config.experts_span_hosts
    assert groups["etp_ep_inter"] == [(rank,) for rank in range(16)]


def test_every_rank_is_a_host_if_hosts_have_different_numbers_of_a_group():
    config = ParallelConfig(world_size=12, ep=6, ranks_per_host=8)
    groups = all_groups(config)
    assert config.experts_span_hosts
    assert groups["etp_ep_intra"] == [tuple(range(6)), *((rank,) for rank in range(6, 12))]
    assert groups["etp_ep_inter"] == [*((rank,) for rank in range(6)), tuple(range(6, 12))]


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3, 4, 6, 8])
def test_experts_span_hosts_if_a_group_does(ranks_per_host):
    for world, ep, etp in product((4, 8, 12, 24), (1, 2, 3, 4, 6, 12), (1, 2)):
        config = ParallelConfig(world_size=world, ep=ep, etp=etp, ranks_per_host=ranks_per_host)
        if world % (ep * etp) == 0:
            hosts = [{rank // ranks_per_host for rank in group} for group in all_groups(config)["etp_ep"]]
            assert config.experts_span_hosts == any(len(each) > 1 for each in hosts), config


def test_the_first_axis_varies_fastest():
    grid = Grid((("tp", 2), ("dp", 3)))
    assert [grid.coordinates(rank) for rank in (0, 1, 2, 5)] == [
        {"tp": 0, "dp": 0},
        {"tp": 1, "dp": 0},
        {"tp": 0, "dp": 1},
        {"tp": 1, "dp": 2},
    ]
    assert grid.groups(["tp"]) == [(0, 1), (2, 3), (4, 5)]
    assert grid.groups(["dp"]) == [(0, 2, 4), (1, 3, 5)]


@pytest.mark.parametrize(
    ("grid_of", "names", "groups"),
    [(attention_of, ("tp", "cp", "dp", "pp"), ATTENTION_GROUPS), (experts_of, ("tp", "ep", "dp", "pp"), EXPERT_GROUPS)],
    ids=["attention", "experts"],
)
def test_groups_of_every_grid_of_every_world_are_those_of_a_box(grid_of, names, groups):
    for world in WORLDS:
        for first, second, pp in splits(world):
            dp = world // (first * second * pp)
            sizes = dict(zip(names, (first, second, dp, pp), strict=True))
            grid = grid_of(world, (first, second, pp))
            for name, members in groups:
                assert set(grid.groups(members)) == groups_of_box(sizes, members), (name, sizes)


def test_all_grids_of_as_many_stages_have_the_same_pipelines_so_that_every_two_fold():
    num_folds = 0
    for world in WORLDS:
        for pp in divisors(world):
            chosen = [split for split in splits(world) if split[2] == pp]
            grids = [make(world, split) for make in (attention_of, experts_of) for split in chosen]
            assert len({frozenset(grid.groups(("pp",))) for grid in grids}) == 1, (world, pp)
            num_folds += len(chosen) ** 2
    assert num_folds == NUM_FOLDS


def test_every_group_list_covers_the_world_once():
    for world in (1, 6, 8, 12):
        for (tp, cp, pp), (etp, ep, stages) in product(splits(world), repeat=2):
            if stages == pp:
                check_cover(ParallelConfig(world_size=world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep))


@pytest.mark.slow
def test_every_fold_of_every_world_has_its_groups_in_both_orders_or_is_rejected():
    num_folds = 0
    for world in WORLDS:
        for (tp, cp, pp), (etp, ep, stages) in product(splits(world), repeat=2):
            if stages != pp:
                continue
            num_folds += 1
            config = ParallelConfig(world_size=world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
            check_cover(config)
            stages_inside = replace(config, order="tp-cp-ep-pp-dp")
            if tp * cp == etp * ep or pp == 1:
                check_cover(stages_inside)
            else:
                with pytest.raises(ParallelSizesError, match="ranks apart for experts"):
                    all_groups(stages_inside)
    assert num_folds == NUM_FOLDS


def test_the_order_of_axes_is_a_parameter():
    config = ParallelConfig(world_size=8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert attention_grid(config).groups(["pp"])[0] == (0, 2)
    assert attention_grid(config).groups(["dp"])[0] == (0, 4)


def test_grids_without_common_pipelines_are_rejected():
    config = ParallelConfig(world_size=8, cp=2, pp=2, ep=4, order="tp-cp-ep-pp-dp")
    with pytest.raises(ParallelSizesError, match="tp 1 x cp 2 ranks apart for attention and etp 1 x ep 4 ranks apart"):
        all_groups(config)
    assert all_groups(replace(config, ep=2))["pp"][0] == (0, 2)


def test_an_impossible_fold_is_rejected_with_its_arithmetic():
    with pytest.raises(ParallelSizesError, match=r"etp 1 x ep 64 x pp 4 = 256 does not divide the world of 128 ranks"):
        expert_grid(ParallelConfig(world_size=128, tp=1, pp=4, ep=64))
