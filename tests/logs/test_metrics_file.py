"""Tags of reports, and metrics.jsonl."""

import json
import math

import pytest

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import ValidationReport
from megatron_moe.logs.metrics_file import (
    enabled_tags,
    encode,
    has_samples_variant,
    layer_tags,
    read_metrics,
    recorded_tags,
    step_record,
    step_tags,
    truncate_metrics,
    validation_losses,
    validation_record,
    validation_tags,
)
from tests.logs.reports import METRICS, step_report, step_result

RECORDS = [{"iteration": i, "lm loss": 3.5 - i} for i in (1, 2, 3)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(encode, RECORDS)))
    return path


def test_records_round_trip(path):
    assert read_metrics(path) == RECORDS


def test_incomplete_last_line_is_skipped(path):
    path.write_bytes(path.read_bytes()[:-5])
    assert read_metrics(path) == RECORDS[:2]


def test_complete_last_line_without_newline_is_read(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert read_metrics(path) == RECORDS


@pytest.mark.parametrize("line", [b'{"iteration": 1', b"[1]", b"nonsense", b""])
def test_broken_line_elsewhere_is_rejected_with_its_number(path, line):
    first, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, *rest]))
    with pytest.raises(DataProblem, match="metrics.jsonl: line 2 is not a JSON object"):
        read_metrics(path)


def test_resumed_run_drops_later_records_and_the_incomplete_line(path):
    with open(path, "ab") as file:
        file.write(b'{"iteration": 4, "lm')
    truncate_metrics(path.with_name("missing.jsonl"), 2)
    truncate_metrics(path, 2)
    assert path.read_bytes() == b"".join(map(encode, RECORDS[:2]))
    assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_reads_only_the_records_that_it_drops(path):
    kept = path.read_bytes() + b"not JSON\n" + encode(RECORDS[-1])
    path.write_bytes(kept + b"".join(encode({"iteration": i, "load": [1.0] * 100}) for i in range(4, 40)))
    truncate_metrics(path, 3)
    assert path.read_bytes() == kept
    assert recorded_tags(path, 3) == {"iteration", "lm loss"}
    assert recorded_tags(path, 4) == frozenset()


def test_a_broken_line_among_the_dropped_records_is_rejected_with_its_number(path):
    path.write_bytes(path.read_bytes() + b"not JSON\n")
    with pytest.raises(DataProblem, match="line 4 is not"):
        truncate_metrics(path, 1)


def test_a_resumed_run_completes_the_last_line_that_it_keeps(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    truncate_metrics(path, 3)
    assert path.read_bytes() == content
    truncate_metrics(path, 0)
    assert path.read_bytes() == b""
    truncate_metrics(path, 0)
    assert recorded_tags(path, 0) == frozenset()


def test_nonfinite_values_become_null_and_vectors_are_rounded():
    line = encode({"lm loss": float("nan"), "load": [1.0, float("inf"), 0.12345678], "count": 3.0, "time": "now"})
    assert line.endswith(b"\n")
    text = line.decode()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(encode({"lm loss": 0.1 + 0.2}))["lm loss"] == 0.1 + 0.2, "scalars keep all digits"
    assert json.loads(text) == {"lm loss": None, "load": [1, None, 0.123457], "count": 3, "time": "now"}


def test_step_tags_are_megatrons_and_omit_missing_values():
    report = step_report(step_result(extra_scalars={"num_zeros": 3.0, "params_norm": 2.0}), peak_flops=1e14)
    assert list(step_tags(report)) == [
        *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "grad-norm experts"),
        *("num-zeros", "params-norm", "iteration-time", "throughput", "tokens-per-second-per-gpu", "mfu"),
        *("load_balancing_loss", "z_loss", "mtp_1 loss", "moe/max_violation"),
    ]
    assert not {"num-zeros", "params-norm", "mfu"} & step_tags(step_report()).keys()


def test_layer_tags():
    tags = layer_tags(METRICS)
    assert tags["moe/load_balancing_loss_layer_1"] == 1.0
    assert tags["moe/max_violation_layer_2"] == 0.4
    assert tags["moe/tokens_per_expert_layer_1"] == [2.0, 6.0]


def test_flags_select_dashboard_tags():
    tags = {**step_tags(step_report(peak_flops=1e14)), "mem-reserved-bytes": 1.0, "forward-backward-time": 0.1}
    plain = enabled_tags(tags, LoggingConfig())
    hidden = {"iteration-time", "world-size", "mem-reserved-bytes", "forward-backward-time"}
    assert not hidden & plain.keys()
    assert {"lm loss", "throughput", "tokens-per-second-per-gpu", "mfu"} <= plain.keys()
    timed = enabled_tags(tags, LoggingConfig(log_timers_to_tensorboard=True))
    assert "iteration-time" in timed and "forward-backward-time" in timed
    everything = LoggingConfig(
        log_timers_to_tensorboard=True, log_world_size_to_tensorboard=True, log_memory_to_tensorboard=True
    )
    assert enabled_tags(tags, everything) == tags


def test_step_record_has_all_values():
    record = step_record(step_report(step_result(apply_update=False)))
    assert record["iteration"] == 20
    assert record["samples"] == 160
    assert record["tokens"] == 40960
    assert record["time"] == "2026-01-02T03:04:05.678901"
    assert record["throughput"] == 2.0
    assert (record["learning-rate"], record["applied-learning-rate"]) == (3e-3, 2e-3)
    assert record["skipped-iterations"] == 1
    assert record["moe/tokens_per_expert_layer_2"] == [4.0, 4.0]
    assert "moe/tokens_per_expert" not in record


def test_validation_loss_is_the_mean_over_the_validation_sets():
    sets = [
        validation_record(
            ValidationReport(iteration=iteration, consumed_samples=8, loss=loss, data_set=name, split=split)
        )
        for iteration, loss, name, split in (
            (2, 9.0, "a", "validation"),
            (2, 3.0, "a", "validation"),  # the later record counts
            (2, 5.0, "b", "validation"),
            (4, 2.0, "", "validation"),
            (4, 8.0, "", "test"),
            (6, 1.0, "a", "validation"),
        )
    ]
    losses = validation_losses([*sets, {"iteration": 6, "lm loss validation-b": None}, {"iteration": 7, "lm loss": 1}])
    assert (losses[2], losses[4], [*losses]) == (4.0, 2.0, [2, 4, 6])
    assert math.isnan(losses[6])


def test_validation_tags():
    report = ValidationReport(iteration=50, consumed_samples=400, loss=0.0)
    assert validation_tags(report) == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert enabled_tags(validation_tags(report), LoggingConfig()) == {"lm loss validation": 0.0}
    assert "lm loss validation ppl" in enabled_tags(
        validation_tags(report), LoggingConfig(log_validation_ppl_to_tensorboard=True)
    )
    several = ValidationReport(iteration=50, consumed_samples=400, loss=0.0, data_set="code")
    assert "lm loss validation-code" in validation_tags(several)
    assert validation_record(report)["samples"] == 400


def test_tags_with_a_curve_over_samples():
    assert all(has_samples_variant(tag) for tag in ("lm loss", "learning-rate", "grad-norm", "lm loss validation"))
    assert not any(has_samples_variant(tag) for tag in ("mem-reserved-bytes", "moe/max_violation", "throughput", "mfu"))
