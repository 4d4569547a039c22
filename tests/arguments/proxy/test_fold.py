"""A layout folded to few ranks keeps the axes that it can."""

import pytest

from arguments.proxy.fold import Sizes, fold, lost_axes, smallest_fold

DEEPSEEK = Sizes(pp=8, ep=64, dp=128, edp=2)
"""DeepSeek-V3 on 1,024 ranks."""
BEYOND = Sizes(tp=4, cp=2, pp=4, ep=64, dp=8, edp=2)
"""Experts over more ranks than there are copies of attention."""


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "sizes"),
    [
        (DEEPSEEK, 8, "pp 2 ep 2 dp 4 edp 2"),
        (DEEPSEEK, 4, "pp 2 ep 2 dp 2"),
        (DEEPSEEK, 2, "ep 2 dp 2"),
        (DEEPSEEK, 1, "one rank"),
        (DEEPSEEK, 3, "dp 3 ep 3"),
        (BEYOND, 8, "tp 2 cp 2 pp 2 ep 2 edp 2"),
        (BEYOND, 16, "tp 2 cp 2 pp 2 ep 2 dp 2 edp 4"),
        (Sizes(), 4, "dp 4 edp 4"),
    ],
)
def test_axes_keep_more_than_one_rank_where_there_are_enough(wanted: Sizes, num_ranks: int, sizes: str):
    found = fold(wanted, num_ranks, etp_is_tp=False)
    assert sorted(str(found).split()) == sorted(sizes.split())


def test_experts_that_are_split_like_the_rest_stay_so():
    found = fold(Sizes(tp=4, ep=8, etp=4, dp=16, edp=4), 8, etp_is_tp=True)
    assert (found.tp, found.etp, found.ep, found.edp) == (2, 2, 2, 2)


def test_two_levels_of_context_parallel_ranks_need_four():
    wanted = Sizes(cp=8, dp=2, edp=2)
    assert fold(wanted, 4, etp_is_tp=False).cp == 2
    assert fold(wanted, 4, etp_is_tp=False, two_levels=True).cp == 4


@pytest.mark.parametrize(("wanted", "ranks"), [(DEEPSEEK, 8), (BEYOND, 8), (Sizes(ep=8, dp=8, edp=2), 4), (Sizes(), 1)])
def test_no_more_ranks_are_taken_than_show_all_axes(wanted: Sizes, ranks: int):
    assert smallest_fold(wanted, 8, etp_is_tp=False)[0] == ranks


def test_what_is_lost_is_named():
    assert lost_axes(BEYOND, fold(BEYOND, 8, etp_is_tp=False)) == ["dp"]
    assert lost_axes(DEEPSEEK, fold(DEEPSEEK, 2, etp_is_tp=False)) == ["pp", "edp"]
    assert lost_axes(DEEPSEEK, fold(DEEPSEEK, 8, etp_is_tp=False)) == []
