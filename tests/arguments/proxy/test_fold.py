"""Folding reduces a parallel layout to a few ranks for `--proxy`."""

import pytest

from arguments.proxy.fold import FoldRequest, Sizes, fold, lost_axes, smallest_fold
from megatron_moe.parallel.grid import ParallelSizesError

DEEPSEEK = Sizes(pp=8, ep=64, dp=128, edp=2)
"""DeepSeek-V3 on 1,024 ranks."""
WIDE_EP = Sizes(tp=4, cp=2, pp=4, ep=64, dp=8, edp=2)
"""Expert-parallel size larger than the data-parallel size of attention."""


@pytest.mark.parametrize(
    ("full", "num_ranks", "sizes"),
    [
        (DEEPSEEK, 8, "pp 2 ep 2 dp 4 edp 2"),
        (DEEPSEEK, 4, "pp 2 ep 2 dp 2"),
        (DEEPSEEK, 2, "ep 2 dp 2"),
        (DEEPSEEK, 1, "one rank"),
        (DEEPSEEK, 3, "dp 3 ep 3"),
        (WIDE_EP, 8, "tp 2 cp 2 pp 2 ep 2 edp 2"),
        (WIDE_EP, 16, "tp 2 cp 2 pp 2 ep 2 dp 2 edp 4"),
        (Sizes(), 4, "dp 4 edp 4"),
    ],
)
def test_axes_keep_several_ranks_where_possible(full: Sizes, num_ranks: int, sizes: str):
    found = fold(FoldRequest(sizes=full), num_ranks)
    assert sorted(str(found).split()) == sorted(sizes.split())


def test_etp_follows_tp_if_it_is_not_set():
    found = fold(FoldRequest(sizes=Sizes(tp=4, ep=8, etp=4, dp=16, edp=4), etp_is_tp=True), 8)
    assert (found.tp, found.etp, found.ep, found.edp) == (2, 2, 2, 2)


def test_hierarchical_context_parallelism_needs_four_ranks():
    full = Sizes(cp=8, dp=2, edp=2)
    assert fold(FoldRequest(sizes=full), 4).cp == 2
    assert fold(FoldRequest(sizes=full, hierarchical_cp=True), 4).cp == 4


@pytest.mark.parametrize(("full", "ranks"), [(DEEPSEEK, 8), (WIDE_EP, 8), (Sizes(ep=8, dp=8, edp=2), 4), (Sizes(), 1)])
def test_smallest_fold_uses_the_fewest_ranks_that_keep_all_axes(full: Sizes, ranks: int):
    assert smallest_fold(FoldRequest(sizes=full), 8)[0] == ranks


def test_lost_axes_are_listed():
    assert lost_axes(WIDE_EP, fold(FoldRequest(sizes=WIDE_EP), 8)) == ["dp"]
    assert lost_axes(DEEPSEEK, fold(FoldRequest(sizes=DEEPSEEK), 2)) == ["pp", "edp"]
    assert lost_axes(DEEPSEEK, fold(FoldRequest(sizes=DEEPSEEK), 8)) == []


def test_fixed_sizes_are_kept():
    request = FoldRequest(sizes=DEEPSEEK, fixed={"pp": 4, "tp": 2})
    assert str(fold(request, 8)) == "tp 2 pp 4 ep 2"
    assert smallest_fold(request, 16)[0] == 16
    with pytest.raises(ParallelSizesError, match="the sizes given after --proxy do not fit 6 ranks: pp 4, tp 2"):
        fold(request, 6)
    with pytest.raises(ParallelSizesError, match="do not fit 4 ranks"):
        smallest_fold(request, 4)
