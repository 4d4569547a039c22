"""Parallel folding: every legal fold of every world up to 64 ranks."""

from itertools import product

import pytest

from megatron_moe.specs.grid import FoldError, Grid, all_groups, attention_grid, expert_grid
from megatron_moe.specs.parallel import ParallelSpec

POWERS = (1, 2, 4, 8, 16, 32, 64)


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


def test_an_impossible_fold_is_refused_with_its_arithmetic():
    with pytest.raises(FoldError, match=r"etp 1 x ep 64 x pp 4 = 256 does not divide the world of 128 ranks"):
        expert_grid(ParallelSpec(world_size=128, tp=1, pp=4, ep=64))
