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


STEPS = [("step", number) for number in range(1, 8)]
EVALUATION = [("step", 1), ("evaluation", 1), ("save", 1), ("step", 2)]


@pytest.mark.parametrize(
    ("flags", "phases", "expected"),
    [
        pytest.param({"manual_gc": True, "manual_gc_interval": 3}, STEPS, [2, 2, 2], id="before steps 4 and 7"),
        pytest.param({"manual_gc": True}, STEPS, [2], id="no interval"),
        pytest.param({"manual_gc": True}, EVALUATION, [2, 2, 0], id="before and after an evaluation"),
        pytest.param({"manual_gc": True, "manual_gc_eval": False}, EVALUATION, [2], id="not at evaluations"),
        pytest.param({"manual_gc_interval": 1}, [*STEPS, *EVALUATION], [], id="automatic collection"),
    ],
)
def test_manual_collection(collected, flags, phases, expected):
    with GarbageCollection(LoopConfig(train_iters=10, **flags)) as garbage:
        assert gc.isenabled() != bool(flags.get("manual_gc"))
        for phase, iteration in phases:
            garbage.enter(phase, iteration)
    assert gc.isenabled() and collected == expected
