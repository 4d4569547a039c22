"""Comparison with one rank: injected differences are detected and explained."""

import pytest
import torch

from megatron_moe.layout_check.table import compare_runs, constant_ratio, explain_ratio
from tests.parity.cells import oracle_of, ranks_of

CELL = "dp=2 ep=2 dispatcher=alltoall"


def compare_changed(change):
    """Comparison of a correct layout after `change` was applied to the gradients of every rank."""
    ranks = ranks_of(CELL)
    for record in ranks:
        for name, held in record.gradients.items():
            change(record.rank, name, held)
    return compare_runs(oracle_of(CELL), ranks)


def test_correct_layout_is_equal():
    comparison = compare_changed(lambda rank, name, held: None)
    assert comparison.all_equal, comparison.text()


@pytest.mark.parametrize(("factor", "kind"), [(2.0, "doubled"), (0.5, "missing")])
def test_a_constant_ratio_is_explained_with_the_axes_of_that_size(factor, kind):
    def scale_experts(rank, name, held):
        if held.meta.grid == "expert":
            held.value.mul_(factor)

    comparison = compare_changed(scale_experts)
    assert {row.grid for row in comparison.failing_rows} == {"expert"} and len(comparison.failing_rows) == 6
    for row in comparison.failing_rows:
        assert row.ratio == pytest.approx(factor)
        assert row.remark == f"looks like a {kind} reduction over a group of 2 (dp or ep)"


def test_missing_reduction_is_explained():
    def keep_own_share(rank, name, held):
        if name.endswith("router.weight"):
            held.value.mul_(0.25 if rank == 0 else 0.75)

    comparison = compare_changed(keep_own_share)
    assert len(comparison.failing_rows) == 3
    for row in comparison.failing_rows:
        assert row.remark.startswith("copies on ranks [0, 1] differ")
        assert row.remark.endswith("their sum is the right value: a reduction over these ranks is missing")


def test_missing_element_is_reported():
    def drop(rank, name, held):
        if name == "output_layer.weight":
            held.value[3, 5] = float("nan")

    (row,) = compare_changed(drop).failing_rows
    assert row.remark == "1 elements exist on no rank"


def test_relative_error_of_a_thousandth_is_detected():
    def bend(rank, name, held):
        if name == "decoder.layers.2.input_layernorm.weight":
            held.value[0] *= 1.001

    (row,) = compare_changed(bend).failing_rows
    assert row.name == "decoder.layers.2.input_layernorm.weight" and row.ratio is None


def test_wrong_norm_is_detected():
    ranks = ranks_of(CELL)
    for record in ranks:
        record.norms[0]["all"] *= 1.07
    (row,) = compare_runs(oracle_of(CELL), ranks).failing_rows
    assert (row.what, row.name) == ("norm", "all, step 1")


def test_constant_ratio_holds_for_every_element():
    expected = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert constant_ratio(3 * expected, expected) == pytest.approx(3)
    assert constant_ratio(expected + 1, expected) is None
    assert explain_ratio(1.3, {"dp": 2}) == ""
