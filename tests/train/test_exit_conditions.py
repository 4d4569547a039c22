"""When a run ends."""

import signal
import time
from dataclasses import replace

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.signals import Signals
from megatron_moe.train.exit_conditions import ExitConditions
from tests.helpers import tiny
from tests.helpers.ranks import on_threads

CONTEXT = ParallelContext.single()


def leave(iteration=0, begun=None, clock=time.monotonic, **changes):
    loop = replace(tiny.plan().loop, **changes)
    return ExitConditions(loop, CONTEXT, iteration=iteration, last_iteration=20, begun=begun, clock=clock)


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
    ending = leave(exit_duration_in_mins=2.0, clock=lambda: next(times))
    assert not ending.now(1)
    assert ending.now(1) and ending.reason == "exiting program after 2.0 minutes"


def test_the_exit_duration_counts_from_the_start_of_the_process():
    ending = leave(exit_duration_in_mins=2.0, begun=100.0, clock=lambda: 100.0 + 121.0)
    assert ending.now(1) and ending.reason == "exiting program after 2.0 minutes"


def test_a_signal_to_one_rank_takes_all_ranks_out_after_the_same_iteration():
    """Fault 28."""

    def left(context):
        signals = Signals(("SIGTERM",))
        ending = ExitConditions(tiny.plan().loop, context, iteration=0, last_iteration=20, signals=signals)
        for iteration in range(20):
            if context.rank == 1 and iteration == 7:
                signals.take(signal.SIGTERM)
            if ending.now(iteration):
                return iteration, ending.reason, ending.preempted
        return None

    expected = (7, "exiting program at iteration 7 because of SIGTERM", True)
    assert on_threads(ParallelConfig(world_size=3), left) == [expected] * 3


def test_the_clock_of_the_slowest_rank_counts():
    """Fault 12: clocks differ, yet all ranks leave together."""

    def left(context):
        times = iter([0.0, 60.0, 150.0 if context.rank else 100.0])
        loop = replace(tiny.plan().loop, exit_duration_in_mins=2.0)
        ending = ExitConditions(loop, context, iteration=0, last_iteration=20, clock=lambda: next(times))
        return [ending.now(1), ending.now(2)], ending.reason, ending.preempted

    assert (
        on_threads(ParallelConfig(world_size=2), left)
        == [([False, True], "exiting program after 2.5 minutes", False)] * 2
    )
