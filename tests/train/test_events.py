"""Run-phase events, and garbage collection at the configured steps."""

import gc

import pytest

from megatron_moe.config.training import LoopConfig
from megatron_moe.train.events import GarbageCollection, RunEvents


@pytest.fixture
def collected(monkeypatch):
    """Generations that were collected."""
    calls = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(generation))
    return calls


def test_observers_are_called_in_order_with_phase_and_iteration():
    calls = []
    events = RunEvents(*(lambda *event, name=name: calls.append((name, *event)) for name in "ab"))
    events.enter("step", 3)
    events.enter("save", 3)
    assert calls == [("a", "step", 3), ("b", "step", 3), ("a", "save", 3), ("b", "save", 3)]


def phases(garbage, *entered):
    for phase, iteration in entered:
        garbage.enter(phase, iteration)


STEPS = [("step", number) for number in range(1, 8)]


def test_collection_is_off_and_happens_after_every_interval(collected):
    with GarbageCollection(LoopConfig(train_iters=10, manual_gc=True, manual_gc_interval=3)) as garbage:
        assert not gc.isenabled() and collected == [2]
        for number in range(1, 8):
            garbage.enter("step", number)
            # before step 4 three steps are done, and before step 7 six
            assert len(collected) == 1 + (number >= 4) + (number >= 7), number
    assert gc.isenabled()


def test_without_an_interval_it_is_collected_once(collected):
    with GarbageCollection(LoopConfig(train_iters=10, manual_gc=True)) as garbage:
        phases(garbage, *STEPS)
    assert collected == [2]


@pytest.mark.parametrize(("at_evaluation", "expected"), [(True, [2, 2, 0]), (False, [2])])
def test_evaluations_are_surrounded_by_collections_unless_that_is_off(collected, at_evaluation, expected):
    with GarbageCollection(LoopConfig(train_iters=10, manual_gc=True, manual_gc_eval=at_evaluation)) as garbage:
        phases(garbage, ("step", 1), ("evaluation", 1), ("save", 1), ("step", 2))
    assert collected == expected


def test_without_the_flag_python_collects_by_itself(collected):
    with GarbageCollection(LoopConfig(train_iters=10, manual_gc_interval=1)) as garbage:
        assert gc.isenabled()
        phases(garbage, *STEPS, ("evaluation", 7))
    assert collected == []
