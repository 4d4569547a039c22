"""Timers, memory statistics and MFU on a GPU."""

from unittest.mock import Mock

import pytest
import torch

from megatron_moe.build import build_reporter
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.reporter import MB, memory_line, memory_tags
from megatron_moe.logs.timers import Timers
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.logs.reports import step_result

pytestmark = pytest.mark.gpu1


@pytest.fixture
def context():
    return ParallelContext.single(device="cuda", dtype=torch.bfloat16)


def test_span_is_timed_on_the_stream_without_synchronising(context):
    a = torch.randn(8192, 8192, device=context.device, dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    timers = Timers(1, context.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with timers.span("forward-backward", level=1):
            for _ in range(50):
                a @ a
        running = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running, "the host is ahead of the device when the span ends"
    torch.cuda.synchronize()
    ((seconds,),) = timers.gather_seconds(context).values()
    least = 50 * 2 * 8192**3 / 2e15
    assert seconds > least, f"50 products cannot take less than {least} s"


def test_recording_a_metric_does_not_synchronise(context):
    metrics, value = MetricAccumulator(), torch.ones(8, device=context.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metrics.record("load", value, layer=1, reduction="sum")
            metrics.record("loss", value.sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    metrics = metrics.reduce(context)
    assert (metrics["load"].layers[1], metrics["loss"].value) == ([3.0] * 8, 8.0)


def test_memory_tags_and_line_on_a_gpu(context):
    before = memory_tags(context.device)["mem-allocated-bytes"]
    held = torch.empty(64 * MB, dtype=torch.uint8, device=context.device)
    tags = memory_tags(context.device)
    assert tags["mem-allocated-bytes"] - before == held.numel()
    assert tags["mem-max-allocated-bytes"] >= tags["mem-allocated-bytes"] <= tags["mem-reserved-bytes"]
    assert " | allocated: " in memory_line(0, 1, context.device)
    assert " | max reserved: " in memory_line(0, 1, context.device)


def test_model_flops_utilization_on_a_gpu(context):
    sink = Mock(rest_seconds=0.0)
    reporter = build_reporter(tiny.plan(), context, sinks=[sink])
    reporter.observe(step_result(1))
    reporter.report_steps({})
    assert sink.log.call_args.args[0].record["mfu"] > 0
