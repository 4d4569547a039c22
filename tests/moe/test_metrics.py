"""Router metrics equal values computed by hand."""

import math

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.router_metrics import record_load
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tolerances import FP64_REF
from tests.moe.routers import logits_as_hidden, make_hidden, make_mb, make_router, sees_logits

ONE_RANK = ParallelContext.single().group("tp_cp")


def _figures(metrics: MetricAccumulator) -> dict:
    return {name: metric.layers[3] for name, metric in metrics.reduce(ParallelContext.single()).items()}


def _load(*microbatches: list[int]) -> dict:
    metrics = MetricAccumulator()
    for counts in microbatches:
        record_load(metrics, 3, torch.tensor(counts), ONE_RANK)
    return _figures(metrics)


@pytest.mark.parametrize(
    ("counts", "violation", "entropy", "dead"),
    [
        ([5, 5, 5, 5], 0.0, 1.0, 0),
        ([0, 0, 12, 0], 3.0, 0.0, 3),
        ([4, 2, 1, 0, 1], 1.5, 1.75 * math.log(2) / math.log(5), 1),
    ],
)
def test_load_metrics_of_one_microbatch(counts, violation, entropy, dead):
    figures = _load(counts)
    FP64_REF.check(figures["moe/max_violation"], violation, "max violation")
    FP64_REF.check(figures["moe/load_entropy"], entropy, "entropy")
    assert figures["moe/dead_experts"] == dead


def test_load_is_averaged_and_tokens_summed_over_microbatches():
    figures = _load([4, 4, 0, 0], [0, 0, 6, 6])
    FP64_REF.check(figures["moe/max_violation"], 1.0, "max violation")
    assert figures["moe/dead_experts"] == 2
    FP64_REF.check(figures["moe/tokens_per_expert"], [4.0, 4.0, 6.0, 6.0], "tokens per expert")


@pytest.mark.parametrize("counts", [[0, 0, 0], [7]])
def test_load_metrics_are_finite_without_tokens_or_with_one_expert(counts):
    figures = _load(counts)
    assert math.isfinite(figures["moe/load_entropy"]) and figures["moe/max_violation"] == 0


def test_router_records_all_metrics_under_its_layer():
    router = make_router(
        score_function="sigmoid",
        expert_bias=True,
        balancing=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        aux_loss_coeffs=(0.1, 0.1, 0.1),
        z_loss_coeff=0.1,
    )
    router.expert_bias[2], router.expert_bias[5] = 0.5, -0.25
    hidden, metrics = make_hidden(), MetricAccumulator()
    router(hidden, make_mb(hidden, metrics=metrics))
    router.record_bias(metrics)
    figures = _figures(metrics)
    assert set(figures) == {
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "global_load_balancing_loss",
        "z_loss",
        "moe/max_violation",
        "moe/load_entropy",
        "moe/dead_experts",
        "moe/dropped_tokens",
        "moe/expert_bias_range",
        "moe/tokens_per_expert",
    }
    assert figures["moe/expert_bias_range"] == 0.75 and figures["moe/dropped_tokens"] == 0


def test_load_is_counted_before_drops():
    """Six tokens select expert 0, which has capacity for three; two other tokens select expert 1."""
    router = sees_logits(num_experts=4, topk=1, pre_softmax=True, capacity=CapacityConfig(factor=1.5))
    hidden, metrics = logits_as_hidden([[5.0, 0, 0, 0]] * 6 + [[0, 5.0, 0, 0]] * 2), MetricAccumulator()
    router(hidden, make_mb(hidden, metrics=metrics))
    figures = _figures(metrics)
    assert figures["moe/tokens_per_expert"] == [6, 2, 0, 0] and figures["moe/max_violation"] == 2
    assert figures["moe/dropped_tokens"] == 3 / 8


def test_expert_choice_records_the_tokens_without_expert():
    """Each of two experts selects at most three of six tokens, two of which are padding."""
    router = sees_logits(num_experts=2, topk=1, balancing=("expert_choice",))
    hidden, metrics = logits_as_hidden([[5.0, 5.0]] * 6), MetricAccumulator()
    valid = torch.tensor([[True] * 4 + [False] * 2])
    router(hidden, make_mb(hidden, metrics=metrics, valid_BS=valid))
    figures = _figures(metrics)
    assert figures["moe/dropped_tokens"] == 1 / 4 and figures["moe/tokens_per_expert"] == [3, 3]
