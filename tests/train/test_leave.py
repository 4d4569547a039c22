"""When a run ends."""

from dataclasses import replace

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.leave import Leave
from tests import tiny

CONTEXT = ParallelContext.single()


def leave(iteration=0, **changes):
    return Leave(replace(tiny.plan().loop, train_iters=20, **changes), CONTEXT, iteration=iteration)


def test_a_run_ends_after_its_last_iteration():
    assert leave().reason(19) is None
    assert leave().reason(20) == "finished after 20 iterations"


def test_the_exit_interval_counts_from_zero_but_not_at_the_start():
    assert [leave(exit_interval=6).reason(i) is None for i in (0, 5, 6, 7)] == [True, True, False, True]
    # a run that went on from iteration 6 trains to 12
    assert [leave(6, exit_interval=6).reason(i) is None for i in (6, 11, 12)] == [True, True, False]


def test_the_exit_duration_is_measured_in_minutes():
    assert leave(exit_duration_minutes=60).reason(1) is None
    assert "minutes" in leave(exit_duration_minutes=-1.0).reason(1)


def test_a_run_that_shall_not_train_ends_at_once():
    assert "--skip-train" in leave(skip_train=True).reason(0)
