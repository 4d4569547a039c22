"""Averages between two reports."""

import math

import pytest

from megatron_moe.logs.interval import Interval
from tests.helpers.tolerances import EXACT
from tests.logs.reports import METRICS, Reading


def interval() -> Interval:
    return Interval(train_iters=100, seq_length=32, world_size=2, peak_flops=1e12)


def report_of(each: Interval):
    return each.report(consumed_samples=48, flops_of=lambda num_sequences: 1e9 * num_sequences, metrics=METRICS)


def test_loss_and_time_are_averaged_and_the_rest_is_of_the_last_step():
    each = interval()
    each.add(Reading(5, loss=2.0, seconds=0.2, learning_rate=0.1, norms={"all": 1.0, "router": 0.1}))
    each.add(Reading(6, loss=4.0, seconds=0.4, learning_rate=0.2, norms={"all": 3.0, "router": 0.3}, num_samples=16))
    report = report_of(each)
    EXACT.check(report.losses["lm loss"], 3.0)
    assert math.isclose(report.step_seconds, 0.3)
    assert (report.iteration, report.num_steps, report.learning_rate, report.batch_size) == (6, 2, 0.2, 16)
    assert report.applied_learning_rate == 0.05
    assert (report.grad_norm, report.grad_norm_parts) == (3.0, {"router": 0.3})
    assert (report.tokens_per_step, report.consumed_tokens, report.flops_per_step) == (512, 48 * 32, 16e9)


def test_refused_steps_are_counted_and_do_not_enter_the_average():
    each = interval()
    each.add(Reading(5, loss=2.0))
    each.add(Reading(6, loss=float("nan"), proceed=False))
    report = report_of(each)
    assert (report.losses["lm loss"], report.skipped_iterations, report.nan_iterations) == (2.0, 1, 1)


def test_a_report_of_refused_steps_alone_shows_what_was_refused():
    each = interval()
    each.add(Reading(6, loss=float("inf"), proceed=False))
    assert report_of(each).losses["lm loss"] == float("inf")


def test_a_report_starts_anew_and_needs_a_step():
    each = interval()
    each.add(Reading(5))
    report_of(each)
    with pytest.raises(AssertionError, match="at least one step"):
        report_of(each)
