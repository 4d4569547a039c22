"""Exit conditions of the training loop."""

import signal
import time
from dataclasses import replace

import pytest

from megatron_moe.build import build_train_state_config
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.signals import Signals
from megatron_moe.train.exit_conditions import ExitConditions
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.ranks import on_threads

CONTEXT = ParallelContext.single()


def exit_conditions(iteration=0, begun=None, clock=time.monotonic, **changes):
    loop = replace(tiny.plan().loop, **changes)
    return ExitConditions(loop, CONTEXT, iteration=iteration, last_iteration=20, begun=begun, clock=clock)


def test_run_ends_after_the_last_iteration():
    assert not exit_conditions().is_reached(19)
    conditions = exit_conditions()
    assert conditions.is_reached(20) and conditions.reason == "finished after 20 iterations"
    conditions = ExitConditions(tiny.plan().loop, CONTEXT, iteration=0, last_iteration=1)
    assert conditions.is_reached(1) and conditions.reason == "finished after 1 iteration"


def test_skipped_iterations_count_towards_train_samples():
    plan = tiny.plan()
    size = plan.batch.global_batch_size
    plan = replace(plan, loop=replace(plan.loop, train_samples=5 * size))
    state = TrainState(iteration=2, consumed_samples=2 * size, skipped_samples=size)
    assert state.last_iteration(build_train_state_config(plan)) == 5


def test_exit_interval():
    assert [exit_conditions(exit_interval=6).is_reached(i) for i in (0, 5, 6, 7)] == [False, False, True, False]
    # a run resumed at iteration 6 trains to 12
    assert [exit_conditions(6, exit_interval=6).is_reached(i) for i in (6, 11, 12)] == [False, False, True]


@pytest.mark.parametrize("begun", [None, 100.0])
def test_exit_duration_counts_minutes_from_the_start_of_the_process(begun):
    times = iter([100.0, 219.0, 221.0] if begun is None else [219.0, 221.0])
    conditions = exit_conditions(exit_duration_in_mins=2.0, begun=begun, clock=lambda: next(times))
    assert not conditions.is_reached(1)
    assert conditions.is_reached(1) and conditions.reason == "exiting program after 2.0 minutes"


@pytest.mark.parametrize(
    ("signals", "number", "last"),
    [(("SIGTERM",), signal.SIGTERM, 7), ((), signal.SIGINT, 8)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_to_one_rank_ends_all_ranks_after_the_same_iteration(signals, number, last):
    """Without `--exit-signal-handler`, ranks exchange signals one iteration late and do not wait for one another."""

    def exit_of(context):
        received = Signals(signals)
        conditions = ExitConditions(tiny.plan().loop, context, iteration=0, last_iteration=20, signals=received)
        for iteration in range(20):
            if context.rank == 1 and iteration == 7:
                received.handle(number)
            if conditions.is_reached(iteration):
                return iteration, conditions.reason, conditions.preempted
        return None

    expected = (last, f"exiting program at iteration {last} because of {number.name}", True)
    assert on_threads(ParallelConfig(world_size=3), exit_of) == [expected] * 3


def test_exit_duration_uses_the_latest_clock_of_all_ranks():

    def exit_of(context):
        times = iter([0.0, 60.0, 150.0 if context.rank else 100.0])
        loop = replace(tiny.plan().loop, exit_duration_in_mins=2.0)
        conditions = ExitConditions(loop, context, iteration=0, last_iteration=20, clock=lambda: next(times))
        return [conditions.is_reached(1), conditions.is_reached(2)], conditions.reason, conditions.preempted

    assert (
        on_threads(ParallelConfig(world_size=2), exit_of)
        == [([False, True], "exiting program after 2.5 minutes", False)] * 2
    )
