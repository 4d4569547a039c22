"""Reduction of metrics over microbatches, ranks and layers."""

import math

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.logs.metric_values import Metric
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_REF


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_reductions_over_microbatches():
    metrics = MetricAccumulator()
    for value in (1.0, 2.0, 6.0):
        metrics.record("loss", scalar(value))
        metrics.record("dropped", scalar(value), reduction="sum")
        metrics.record("violation", scalar(value), reduction="max")
    metrics.record("entropy", scalar(10.0), count=torch.tensor(4))
    metrics.record("entropy", scalar(2.0), count=torch.tensor(2))
    metrics.record("empty", scalar(0.0), count=torch.tensor(0))
    values = {name: metric.value for name, metric in metrics.reduce(ParallelContext.single()).items()}
    assert math.isnan(values.pop("empty"))
    assert values == {"loss": 3.0, "dropped": 9.0, "violation": 6.0, "entropy": 2.0}
    assert metrics.reduce(ParallelContext.single()) == {}, "taking resets the accumulator"


def test_value_is_the_mean_or_maximum_over_layers():
    metrics = MetricAccumulator()
    for layer, value in ((7, 1.0), (1, 4.0)):
        metrics.record("aux", scalar(value), layer=layer)
        metrics.record("violation", scalar(value), layer=layer, reduction="max")
    metrics = metrics.reduce(ParallelContext.single())
    assert metrics["aux"].value == 2.5
    assert metrics["violation"].value == 4.0
    assert list(metrics["aux"].layers.items()) == [(1, 4.0), (7, 1.0)]


def test_vector_metrics():
    metrics = MetricAccumulator()
    for layer in (0, 1):
        metrics.record("load", torch.tensor([1, 2, 3]) * (layer + 1), layer=layer, reduction="sum")
    metric = metrics.reduce(ParallelContext.single())["load"]
    assert metric.layers[1] == [2.0, 4.0, 6.0]
    assert metric.value == [1.5, 3.0, 4.5]


def test_recording_copies_and_detaches():
    metrics = MetricAccumulator()
    value = torch.ones((), dtype=torch.float64, requires_grad=True)
    metrics.record("loss", value)
    with torch.no_grad():
        value.fill_(9.0)
    assert not metrics.entries["loss", None].value.requires_grad
    assert metrics.reduce(ParallelContext.single())["loss"].value == 1.0


def test_bf16_values_are_accumulated_in_higher_precision():
    metrics = MetricAccumulator()
    for _ in range(300):
        metrics.record("tokens", torch.ones((), dtype=torch.bfloat16), reduction="sum")
    assert metrics.reduce(ParallelContext.single())["tokens"].value == 300.0


def test_changed_reduction_or_shape_is_an_error():
    metrics = MetricAccumulator()
    metrics.record("loss", scalar(0.0))
    with pytest.raises(AssertionError, match="recorded as .'mean'.*now as .'max'"):
        metrics.record("loss", scalar(0.0), reduction="max")
    with pytest.raises(AssertionError, match="now as"):
        metrics.record("loss", torch.zeros(2))


def test_ranks_are_reduced_independently_of_recording_order():
    def rank(context: ParallelContext) -> dict[str, object]:
        r = context.group("dp").rank
        metrics = MetricAccumulator()
        names = ["mean", "worst", "total"] if r == 0 else ["total", "worst", "mean"]
        for name in names:
            reduction = {"mean": "mean", "worst": "max", "total": "sum"}[name]
            metrics.record(name, scalar(float(r + 1)), count=torch.tensor(r + 1), reduction=reduction)
        return {name: metric.value for name, metric in metrics.reduce(context).items()}

    for result in on_threads(ParallelConfig(world_size=4), rank):
        FP64_REF.check(result["mean"], 1.0, "mean")
        EXACT.check(result["total"], 10.0, "sum")
        EXACT.check(result["worst"], 4.0, "max")


def test_every_rank_gets_the_metrics_of_all_stages():
    def rank(context: ParallelContext) -> dict[str, Metric]:
        metrics, stage = MetricAccumulator(), context.group("pp").rank
        metrics.record("loss", scalar(2.0 * stage + context.group("dp").rank), layer=stage)
        metrics.record("worst", scalar(float(stage)), layer=stage, reduction="max")
        if stage == 1:
            metrics.record("mtp_1 loss", scalar(5.0))
        return metrics.reduce(context)

    for metrics in on_threads(ParallelConfig(world_size=4, pp=2), rank):
        assert metrics["loss"] == Metric(1.5, {0: 0.5, 1: 2.5})
        assert metrics["worst"] == Metric(1.0, {0: 0.0, 1: 1.0})
        assert metrics["mtp_1 loss"] == Metric(5.0)


def test_layer_recorded_on_two_stages_is_an_error():
    def rank(context: ParallelContext) -> None:
        metrics = MetricAccumulator()
        metrics.record("loss", scalar(1.0), layer=3)
        metrics.reduce(context)

    with pytest.raises(AssertionError, match="recorded on several stages"):
        on_threads(ParallelConfig(world_size=2, pp=2), rank)


def test_rows_are_folded_per_layer_when_read() -> None:
    metrics, seen = MetricAccumulator(), []

    def fold(metrics: MetricAccumulator, numbers: dict[int, int], rows: torch.Tensor) -> None:
        seen.append((numbers, rows.tolist()))
        metrics.record("sum", rows.sum())

    for layer, row in ((3, 1.0), (5, 2.0), (3, 4.0)):
        metrics.collect("rows", layer, torch.tensor([row]), fold)
    assert not seen
    figures = metrics.take_all().reduce(ParallelContext.single())
    assert seen == [({3: 2, 5: 1}, [[1.0], [4.0], [2.0]])] and figures["sum"].value == 7.0
    assert not metrics.take_all().entries, "a row is folded once"


def test_rows_are_folded_in_batches() -> None:
    metrics = MetricAccumulator()
    for _ in range(300):
        metrics.collect("rows", 0, torch.ones(1), lambda metrics, numbers, rows: metrics.record("rows", rows.sum()))
    assert metrics.entries["rows", None].value == 256
    assert metrics.reduce(ParallelContext.single())["rows"].value == 100.0
