"""Layouts of 2 and 4 ranks under NCCL give the loss, metrics, norm, gradients and weights of one CPU rank.

The cells are a pairwise cover: for 22 dimensions of parallelism and model, every pair of values that a world size
allows occurs in a cell. All cells of a world size run in one process group, while the CPU computes expected results.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_moe.layout_check.record import RankRecord
from megatron_moe.layout_check.table import Comparison, compare_runs
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP32_LAYOUT, FP64_LAYOUT
from tests.parity.cells import oracle_in_fp32, oracle_of, plan_of, run_rank, run_rank_in_fp32
from tests.parity.cover import cover
from tests.parity.dimensions import cell_of


def pytest_generate_tests(metafunc):
    """Generates the cells only for sessions that select them, because the generation takes seconds."""
    if "name" in metafunc.fixturenames:
        selected = [ranks for ranks in (2, 4) if f"not gpu{ranks}" not in metafunc.config.option.markexpr]
        cells = [
            pytest.param(name, id=name, marks=getattr(pytest.mark, f"gpu{ranks}"))
            for ranks in selected
            for name in cover(2, ranks).names
        ]
        metafunc.parametrize("name", cells or [pytest.param("plain", marks=pytest.mark.gpu2)])


def ranks_and_oracle(
    name: str, run: Callable[..., RankRecord], dtype: torch.dtype
) -> tuple[list[RankRecord], RankRecord]:
    """Runs the cell on one GPU per rank and, at the same time, on one CPU rank in double precision."""
    with ThreadPoolExecutor(1) as executor:
        oracle = executor.submit(oracle_of, name)
        ranks = on_gpus(plan_of(cell_of(name)).parallel, run, name, dtype=dtype)
        return ranks, oracle.result()


def check(comparison: Comparison, record_property: Callable[[str, object], None]) -> None:
    """Asserts equality within the tolerances. Adds the largest error of every kind of quantity to the test report."""
    for what in {row.what for row in comparison.rows}:
        record_property(what, max(row.error for row in comparison.rows if row.what == what))
    assert comparison.all_equal, comparison.text()


def test_fp64_layouts_match_one_rank(name, record_property):
    ranks, oracle = ranks_and_oracle(name, run_rank, torch.float64)
    check(compare_runs(oracle, ranks, rtol=FP64_LAYOUT.rtol), record_property)


def test_fp32_layouts_on_the_fastest_kernels_match_one_rank(name, record_property):
    """AdamW replaces Muon, whose Newton-Schulz steps multiply small singular values, and their rounding, by 485.

    In fp32, rounding can decide between two almost equal experts of a token. Then one CPU rank in fp32 is expected."""
    name = name.replace(" optimizer=muon", "")
    ranks, oracle = ranks_and_oracle(name, run_rank_in_fp32, torch.float32)
    comparison = compare_runs(oracle, ranks, rtol=FP32_LAYOUT.rtol)
    if any(row.bad and row.what == "tokens" for row in comparison.rows):
        comparison = compare_runs(oracle_in_fp32(name), ranks, rtol=FP32_LAYOUT.rtol)
    check(comparison, record_property)
