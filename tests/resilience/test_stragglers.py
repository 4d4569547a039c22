"""Straggler reports."""

from torch import nn

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.stragglers import Stragglers, straggler_lines
from tests.helpers.ranks import on_threads


def test_slowest_ranks_relative_to_the_median() -> None:
    ranks = [{"forward": value, "step": 10.0} for value in (1.0, 3.0, 1.2, 1.1)]
    lines = straggler_lines(ranks, 2)
    assert "    forward .. min 1.00 (rank 0), median 1.15, max 3.00 (rank 1)" in lines
    assert len(straggler_lines([{}, {}], 1)) == 1, "nothing measured"
    assert "    slowest by forward: rank 1 (2.61 x the median), rank 2 (1.04 x the median)" in lines


def test_report_covers_all_ranks_and_resets() -> None:
    def main(context: ParallelContext) -> tuple[list[str], list[str]]:
        watched = Stragglers(nn.Linear(2, 2), context, num_named=1, flops=1e12)
        watched.record_step_time(0.5)
        watched.record_data_time(0.1 * (1 + context.rank))
        return watched.report(), watched.report()

    first, second = on_threads(ParallelConfig(world_size=2), main)
    assert first == second and len(first[1]) == 1
    assert "    TFLOP/s .. min 2.00 (rank 0), median 2.00, max 2.00 (rank 0)" in first[0]
    assert any("data ..... min 100.00 (rank 0), median 150.00, max 200.00 (rank 1)" in line for line in first[0])
