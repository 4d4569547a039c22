"""Step reports, and the log lines in Megatron's and the short format."""

from datetime import datetime, timedelta

import pytest

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import (
    ValidationReport,
    megatron_log_line,
    short_log_line,
    short_validation_line,
    step_line,
    validation_lines,
)
from megatron_moe.logs.metric_values import Metric
from tests.helpers.tolerances import EXACT
from tests.logs.reports import step_report, step_result

PLAIN = LoggingConfig()


def test_megatron_line():
    assert megatron_log_line(step_report(), PLAIN) == (
        " [2026-01-02 03:04:05.678901] iteration       20/     250 | consumed samples:          160 |"
        " elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-03 | global batch size:     8 |"
        " lm loss: 7.250000E+00 | load_balancing_loss: 1.250000E+00 | z_loss: 5.000000E-01 | mtp_1 loss: 3.500000E+00 |"
        " moe/max_violation: 0.30 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_megatron_line_with_all_optional_fields():
    result = step_result(extra_scalars={"num_zeros": 7.0, "params_norm": 12.5}, apply_update=False)
    line = megatron_log_line(step_report(result, peak_flops=1e13), LoggingConfig(log_throughput=True))
    names = [field.split(":")[0].strip() for field in line.split("|")[1:-1]]
    assert names == [
        *("consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)", "learning rate"),
        *("global batch size", "lm loss", "load_balancing_loss", "z_loss", "mtp_1 loss", "moe/max_violation"),
        *("loss scale", "grad norm", "num zeros", "params norm"),
        *("number of skipped iterations", "number of nan iterations", "tokens/s/GPU", "MFU"),
    ]
    assert "(TFLOP/s/GPU): 2.0 |" in line and " num zeros: 7 | params norm: 12.500 |" in line
    assert line.endswith(" number of nan iterations:   0 | tokens/s/GPU: 4096 | MFU: 20.0% |")


def test_nan_loss_is_shown_and_negative_average_is_not():
    report = step_report(step_result(loss=float("nan")), metrics={"odd loss": Metric(-1.0)})
    line = megatron_log_line(report, PLAIN)
    assert " lm loss: NAN |" in line and "odd loss" not in line


def test_throughput_is_per_device_and_utilization_relative_to_the_peak():
    report = step_report(world_size=4, flops_per_step=8e14, peak_flops=1e15)
    EXACT.check(report.tflops_per_gpu, 400.0)
    EXACT.check(report.tokens_per_second_per_gpu, 1024.0)
    EXACT.check(report.model_flops_utilization, 0.4)
    assert step_report(peak_flops=None).model_flops_utilization is None


def test_short_line():
    assert short_log_line(step_report()) == (
        " 20/250   8% | 0:01:55 left | loss 7.2500 | grad 1.234 | lr 3.00e-03 | 4,096 tok/s/GPU | max vio 0.40"
    )
    assert step_report().remaining == timedelta(seconds=115)


@pytest.mark.parametrize("iteration", [1, 1_000_000])
def test_short_line_has_at_most_120_columns(iteration):
    result = step_result(
        iteration, seconds=12.0, loss=12.5, norms={"all": 123456.789}, num_samples=4 * 10**6, apply_update=False
    )
    assert len(short_log_line(step_report(result, train_iters=1_000_000))) <= 120


def test_log_style_selects_the_line():
    assert step_line(step_report(), LoggingConfig(log_style="short")).startswith(" 20/250")
    assert step_line(step_report(), PLAIN).startswith(" [2026")


def test_validation_lines():
    report = ValidationReport(iteration=50, consumed_samples=400, loss=2.0)
    line = " validation loss at iteration 50 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert validation_lines(report) == ["-" * (len(line) + 1), line, "-" * (len(line) + 1)]
    test = ValidationReport(
        iteration=50, consumed_samples=400, loss=30.0, where="on test set", data_set="code", split="test"
    )
    assert validation_lines(test)[1].startswith(" validation loss at iteration 50 on test set code | ")
    assert "lm loss PPL: 4.851652E+08" in validation_lines(test)[1], "perplexity is limited to exp(20)"
    assert short_validation_line(test).startswith("50 on test set code: lm loss 30.0000 (ppl ")


def test_time_of_the_line_is_that_of_the_report():
    line = megatron_log_line(step_report(when=datetime(2030, 12, 31, 23, 59, 59)), PLAIN)
    assert line.startswith(" [2030-12-31 23:59:59.000000] iteration")


def test_loss_and_time_are_averages_and_iteration_is_the_last():
    report = step_report(step_result(5, loss=2.0, seconds=0.2), step_result(6, loss=4.0, seconds=0.4, num_samples=16))
    EXACT.check(report.loss, 3.0)
    assert report.step_seconds == pytest.approx(0.3) and report.iteration == 6
    EXACT.check(report.tokens_per_second_per_gpu, 12 * 256 / report.step_seconds)


def test_rejected_steps_are_counted_and_excluded_from_the_average():
    rejected = step_result(6, loss=float("inf"), apply_update=False)
    report = step_report(step_result(5, loss=2.0), rejected)
    assert (report.loss, report.skipped_iterations, report.nan_iterations) == (2.0, 1, 1)
    assert step_report(rejected).loss == float("inf"), "only rejected steps"
