"""Parallel folding: every legal fold of every world up to 64 ranks."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_moe.specs.grid import FoldError, Grid, all_groups, attention_grid, expert_grid
from megatron_moe.specs.parallel import ParallelSpec

POWERS = (1, 2, 4, 8, 16, 32, 64)


def test_dynamic_context_parallelism_has_groups_of_every_power_of_two():
    groups = all_groups(ParallelSpec(world_size=16, tp=2, cp=4, max_seqlen_per_rank=8))
    assert groups["cp_1"] == [(rank,) for rank in range(16)]
    assert groups["cp_2"][:2] == [(0, 2), (1, 3)] and len(groups["cp_2"]) == 8
    assert sorted(groups["cp_4"]) == sorted(groups["cp"])
    assert "cp_2" not in all_groups(ParallelSpec(world_size=16, tp=2, cp=4))
    with pytest.raises(FoldError, match="3 ranks: not a power of two"):
        all_groups(ParallelSpec(world_size=3, cp=3, max_seqlen_per_rank=8))


def test_levels_of_context_parallelism_are_neighbours_and_a_ring_between_them():
    groups = all_groups(ParallelSpec(world_size=8, cp=8, cp_sub_axes=(2, 4)))
    assert groups["cp_a2a"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["cp_p2p"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    with pytest.raises(FoldError, match="cp_a2a 2 x cp_p2p 2 is not the size 8 of axis cp"):
        all_groups(ParallelSpec(world_size=8, cp=8, cp_sub_axes=(2, 2)))


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


def test_every_group_list_covers_the_world_once_in_every_fold():
    for world, tp, pp, cp, ep, etp in product((1, 2, 6, 8, 16), (1, 2, 4), (1, 2, 4), (1, 2), POWERS[:5], (1, 2)):
        if world % (tp * pp * cp) or world % (etp * ep * pp):
            continue
        spec = ParallelSpec(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
        for name, groups in all_groups(spec).items():
            assert sorted(rank for group in groups for rank in group) == list(range(world)), (name, spec)


def test_expert_parallelism_may_exceed_data_parallelism():
    spec = ParallelSpec(world_size=256, tp=4, cp=2, pp=4, ep=64)
    assert (spec.dp, spec.edp) == (8, 1)
    assert all_groups(spec)["ep"][0] == tuple(range(64))


def test_the_order_of_axes_is_a_parameter():
    spec = ParallelSpec(world_size=8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert attention_grid(spec).groups(["pp"])[0] == (0, 2)
    assert attention_grid(spec).groups(["dp"])[0] == (0, 4)


def test_grids_without_common_pipelines_are_refused():
    spec = ParallelSpec(world_size=8, cp=2, pp=2, ep=4, order="tp-cp-ep-pp-dp")
    with pytest.raises(FoldError, match="tp 1 x cp 2 ranks apart for attention and etp 1 x ep 4 ranks apart"):
        all_groups(spec)
    assert all_groups(replace(spec, ep=2))["pp"][0] == (0, 2)


def test_an_impossible_fold_is_refused_with_its_arithmetic():
    with pytest.raises(FoldError, match=r"etp 1 x ep 64 x pp 4 = 256 does not divide the world of 128 ranks"):
        expert_grid(ParallelSpec(world_size=128, tp=1, pp=4, ep=64))
