"""A layout folded to few ranks keeps the axes that it can."""

import pytest

from arguments.proxy.fold import Sizes, Wish, fold, lost_axes, smallest_fold
from megatron_moe.parallel.grid import FoldError

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
    found = fold(Wish(sizes=wanted), num_ranks)
    assert sorted(str(found).split()) == sorted(sizes.split())


def test_experts_that_are_split_like_the_rest_stay_so():
    found = fold(Wish(sizes=Sizes(tp=4, ep=8, etp=4, dp=16, edp=4), etp_is_tp=True), 8)
    assert (found.tp, found.etp, found.ep, found.edp) == (2, 2, 2, 2)


def test_two_levels_of_context_parallel_ranks_need_four():
    wanted = Sizes(cp=8, dp=2, edp=2)
    assert fold(Wish(sizes=wanted), 4).cp == 2
    assert fold(Wish(sizes=wanted, two_levels=True), 4).cp == 4


@pytest.mark.parametrize(("wanted", "ranks"), [(DEEPSEEK, 8), (BEYOND, 8), (Sizes(ep=8, dp=8, edp=2), 4), (Sizes(), 1)])
def test_no_more_ranks_are_taken_than_show_all_axes(wanted: Sizes, ranks: int):
    assert smallest_fold(Wish(sizes=wanted), 8)[0] == ranks


def test_what_is_lost_is_named():
    assert lost_axes(BEYOND, fold(Wish(sizes=BEYOND), 8)) == ["dp"]
    assert lost_axes(DEEPSEEK, fold(Wish(sizes=DEEPSEEK), 2)) == ["pp", "edp"]
    assert lost_axes(DEEPSEEK, fold(Wish(sizes=DEEPSEEK), 8)) == []


def test_sizes_that_somebody_fixed_stay():
    wish = Wish(sizes=DEEPSEEK, fixed={"pp": 4, "tp": 2})
    assert str(fold(wish, 8)) == "tp 2 pp 4 ep 2"
    assert smallest_fold(wish, 16)[0] == 16
    with pytest.raises(FoldError, match="the sizes behind --proxy do not fit 6 ranks: pp 4, tp 2"):
        fold(wish, 6)
    with pytest.raises(FoldError, match="do not fit 4 ranks"):
        smallest_fold(wish, 4)
