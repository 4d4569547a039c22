"""When a run ends."""

import time
from dataclasses import replace

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.leave import Leave
from tests import tiny

CONTEXT = ParallelContext.single()


def leave(iteration=0, clock=time.monotonic, **changes):
    return Leave(replace(tiny.plan().loop, train_iters=20, **changes), CONTEXT, iteration=iteration, clock=clock)


def test_a_run_ends_after_its_last_iteration():
    assert not leave().now(19)
    ending = leave()
    assert ending.now(20) and ending.reason == "finished after 20 iterations"


def test_the_exit_interval_counts_from_zero_but_not_at_the_start():
    assert [leave(exit_interval=6).now(i) for i in (0, 5, 6, 7)] == [False, False, True, False]
    # a run that went on from iteration 6 trains to 12
    assert [leave(6, exit_interval=6).now(i) for i in (6, 11, 12)] == [False, False, True]


def test_the_exit_duration_is_measured_in_minutes():
    times = iter([100.0, 100.0 + 119.0, 100.0 + 121.0])
    ending = leave(exit_duration_minutes=2.0, clock=lambda: next(times))
    assert not ending.now(1)
    assert ending.now(1) and ending.reason == "exiting program after 2.0 minutes"
