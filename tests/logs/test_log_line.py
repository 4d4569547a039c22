"""Lines are Megatron's to the character, or short enough for a terminal."""

import math
from datetime import datetime, timedelta

import pytest

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import (
    Interval,
    ValidationReport,
    arguments_dump,
    megatron_line,
    short_line,
    short_validation_line,
    step_line,
    validation_lines,
)
from tests.helpers.tolerances import EXACT
from tests.logs.reports import METRICS, Reading, step_report

PLAIN = LoggingConfig()


def test_the_megatron_line_has_its_fields_order_and_formats():
    assert megatron_line(step_report(), PLAIN) == (
        " [2026-01-02 03:04:05.678901] iteration       20/     250 | consumed samples:          160 |"
        " elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-03 | global batch size:     8 |"
        " lm loss: 7.250000E+00 | load_balancing_loss: 1.250000E+00 | z_loss: 5.000000E-01 | mtp_1 loss: 3.500000E+00 |"
        " moe/max_violation: 0.30 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_optional_fields_stand_where_megatron_has_them():
    report = step_report(
        skipped_samples=16, num_zeros=7, params_norm=12.5, skipped_iterations=2, nan_iterations=1, peak_flops=1e13
    )
    line = megatron_line(report, LoggingConfig(log_throughput=True))
    names = [field.split(":")[0].strip() for field in line.split("|")[1:-1]]
    assert names == [
        "consumed samples",
        "skipped samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "learning rate",
        "global batch size",
        "lm loss",
        "load_balancing_loss",
        "z_loss",
        "mtp_1 loss",
        "moe/max_violation",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "number of skipped iterations",
        "number of nan iterations",
        "tokens/s/GPU",
        "MFU",
    ]
    assert "skipped samples:           16 |" in line
    assert "(TFLOP/s/GPU): 2.0 |" in line
    assert line.endswith(" number of nan iterations:   1 | tokens/s/GPU: 4096 | MFU: 20.0% |")


def test_a_loss_that_is_not_a_number_is_shown_and_a_negative_average_is_not():
    line = megatron_line(step_report(losses={"lm loss": float("nan"), "odd loss": -1.0}), PLAIN)
    assert " lm loss: NAN |" in line
    assert "odd loss" not in line


def test_throughput_is_per_device_and_utilization_per_peak():
    report = step_report(world_size=4, flops_per_step=8e14, peak_flops=1e15)
    EXACT.check(report.tflops_per_gpu, 400.0)
    EXACT.check(report.tokens_per_second_per_gpu, 1024.0)
    EXACT.check(report.model_flops_utilization, 0.4)
    assert step_report(peak_flops=None).model_flops_utilization is None


def test_the_short_line_tells_place_time_left_loss_speed_and_the_worst_layer():
    assert short_line(step_report()) == (
        " 20/250   8% | 0:01:55 left | loss 7.2500 | grad 1.234 | lr 3.00e-03 | 4,096 tok/s/GPU | max vio 0.40"
    )
    assert step_report().remaining == timedelta(seconds=115)


@pytest.mark.parametrize("iteration", [1, 1_000_000])
def test_the_short_line_fits_a_terminal(iteration):
    report = step_report(
        iteration=iteration,
        train_iters=1_000_000,
        step_seconds=12.0,
        losses={"lm loss": 12.5},
        grad_norm=123456.789,
        tokens_per_step=10**9,
        skipped_iterations=3,
    )
    assert len(short_line(report)) <= 120


def test_the_style_of_the_run_decides():
    assert step_line(step_report(), LoggingConfig(log_style="short")).startswith(" 20/250")
    assert step_line(step_report(), PLAIN).startswith(" [2026")


def test_validation_lines_are_megatrons():
    report = ValidationReport(iteration=50, consumed_samples=400, losses={"lm loss": 2.0})
    line = " validation loss at iteration 50 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert validation_lines(report) == ["-" * (len(line) + 1), line, "-" * (len(line) + 1)]


def test_validation_names_the_place_at_the_end_and_the_data_set():
    report = ValidationReport(
        iteration=50, consumed_samples=400, losses={"lm loss": 30.0}, where="on test set", data_set="code", split="test"
    )
    assert validation_lines(report)[1].startswith(" validation loss at iteration 50 on test set code | ")
    assert "lm loss PPL: 4.851652E+08" in validation_lines(report)[1], "perplexity is held at exp(20)"
    assert short_validation_line(report).startswith("50 on test set code: lm loss 30.0000 (ppl ")


def test_arguments_are_sorted_and_padded_to_48_columns():
    first, *rows, last = arguments_dump({"seq_length": 256, "lr": 0.003})
    assert first == "------------------------ arguments ------------------------"
    assert last == "-------------------- end of arguments ---------------------"
    assert rows == ["  lr " + "." * 46 + " 0.003", "  seq_length " + "." * 38 + " 256"]


def test_time_of_day_is_that_of_the_report():
    line = megatron_line(step_report(when=datetime(2030, 12, 31, 23, 59, 59)), PLAIN)
    assert line.startswith(" [2030-12-31 23:59:59.000000] iteration")


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
