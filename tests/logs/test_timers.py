"""Timers over ranks, and Megatron's timer lines."""

import itertools

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.logs.timers import Timers, Timestamp, timer_lines
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads

CPU = torch.device("cpu")
TIMINGS = {"forward-backward": [0.1, 0.3], "optimizer": [0.01, 0.02]}


@pytest.fixture
def clock(monkeypatch):
    """Advances by one second per reading."""
    monkeypatch.setattr("time.perf_counter", itertools.count(1.0).__next__)


def test_spans_are_summed_and_divided_by_steps(clock):
    timers = Timers(1, CPU)
    for _ in range(2):
        timers.begin_step()
        for _ in range(2):
            with timers.span("forward-backward", level=1):
                pass
    assert timers.gather_seconds(ParallelContext.single()) == {"forward-backward": [2.0]}
    assert timers.gather_seconds(ParallelContext.single()) == {}


def test_a_step_that_the_device_has_not_completed_is_left_for_the_next_report(clock, monkeypatch):
    timers = Timers(1, CPU)
    for name in ("first", "second"):
        timers.begin_step()
        with timers.span(name, level=1):
            pass
    running = timers._steps[-1][-1]
    monkeypatch.setattr(Timestamp, "has_completed", lambda moment: moment is not running._end)
    monkeypatch.setattr(Timestamp, "synchronize", None)
    assert timers.gather_seconds(ParallelContext.single()) == {"first": [1.0]}
    monkeypatch.undo()
    assert timers.gather_seconds(ParallelContext.single()) == {"second": [1.0]}


def test_a_backward_lasts_from_its_last_begin_to_its_last_end(clock):
    timers = Timers(2, CPU)
    span, other = timers.backward_span("experts-backward", level=2), timers.backward_span("never-run", level=2)
    assert timers.backward_span("above", level=3) is None and other is not None
    for mark in (span.mark_begin, span.mark_begin, span.mark_end, span.mark_begin, span.mark_end):
        mark()
    assert timers.gather_seconds(ParallelContext.single()) == {"experts-backward": [2.0], "never-run": [0.0]}


def test_spans_above_the_timing_level_are_not_measured(clock):
    timers = Timers(1, CPU)
    with timers.span("forward-compute", level=2), timers.span("forward-backward", level=1):
        pass
    assert timers.gather_seconds(ParallelContext.single()) == {"forward-backward": [1.0]}


def test_failing_span_is_timed(clock):
    timers = Timers(1, CPU)
    with pytest.raises(ValueError), timers.span("optimizer", level=1):
        raise ValueError
    assert timers.gather_seconds(ParallelContext.single()) == {"optimizer": [1.0]}


def test_times_are_gathered_and_missing_spans_are_zero(clock):
    def rank(context: ParallelContext) -> dict:
        timers = Timers(2, CPU)
        if context.rank == 1:
            with timers.span("send", level=2):
                pass
        return timers.gather_seconds(context)

    results = on_threads(ParallelConfig(world_size=2), rank)
    assert all(list(result) == ["send"] and result["send"][0] == 0.0 < result["send"][1] for result in results)


def test_timer_lines():
    assert timer_lines(TIMINGS, "minmax") == [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (100.00, 300.00)",
        "    optimizer ......................................: (10.00, 20.00)",
    ]
    assert timer_lines(TIMINGS, "max")[:2] == [
        "max time across ranks (ms):",
        "    forward-backward ...............................: 300.00",
    ]
    assert timer_lines(TIMINGS, "all")[:4] == [
        "times across ranks (ms):",
        "  forward-backward:",
        "     rank  0: 100.00",
        "     rank  1: 300.00",
    ]
    assert timer_lines({}, "minmax") == []
