"""Sinkhorn, quantile balancing and expert choice equal slow versions written from their formulas."""

import math

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.moe.balancing import update_routers
from megatron_moe.moe.routing_methods import SINKHORN_ITERATIONS, SINKHORN_TOLERANCE, sinkhorn
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP32_REF, FP64_REF
from tests.moe.oracle import best
from tests.moe.routers import EXPERTS, logits_as_hidden, make_hidden, make_mb, make_router, sees_logits


def _logits(tokens: int, *, seed: int = 3, spread: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return spread * torch.randn(tokens, EXPERTS, generator=draw, dtype=torch.float64)


# Sinkhorn


def _slow_sinkhorn(logits: list[list[float]]) -> list[list[float]]:
    """Scales rows and columns alternately until the column scales converge."""
    cost = [[math.exp(x) for x in row] for row in logits]
    num_rows, num_columns = len(cost), len(cost[0])
    columns, error = [1.0] * num_columns, math.inf
    while error > 1e-4:
        rows = [1 / num_rows / (sum(c * x for c, x in zip(columns, row, strict=True)) + 1e-8) for row in cost]
        new = [
            1 / num_columns / (sum(rows[t] * cost[t][e] for t in range(num_rows)) + 1e-8) for e in range(num_columns)
        ]
        error = sum(abs(a - b) for a, b in zip(new, columns, strict=True)) / num_columns
        columns = new
    return [[columns[e] * cost[t][e] * rows[t] for e in range(num_columns)] for t in range(num_rows)]


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_sinkhorn_matrix_and_choices_equal_the_slow_version(spread):
    logits = _logits(24, spread=spread)
    # Subtracting the maximum of a row changes only the relative size of the constant 1e-8 in the formula.
    shifted = logits - logits.amax(dim=1, keepdim=True)
    FP64_REF.check(sinkhorn(logits, None), _slow_sinkhorn(shifted.tolist()), "matrix")
    hidden = logits_as_hidden(logits.tolist())
    routing = sees_logits(balancing=("sinkhorn",))(hidden, make_mb(hidden))
    slow = _slow_sinkhorn(logits.tolist())
    assert routing.ids_TK.tolist() == [best(row, 2, list(range(EXPERTS))) for row in slow]


def test_sinkhorn_weights_are_the_plain_scores():
    hidden = logits_as_hidden(_logits(6).tolist())
    logits = hidden.detach()[:, 0]
    for topk, weights in ((2, logits.softmax(-1)), (1, logits.sigmoid())):
        routing = sees_logits(balancing=("sinkhorn",), topk=topk)(hidden, make_mb(hidden))
        FP64_REF.check(routing.probs_TK, weights.gather(1, routing.ids_TK), f"weights, k = {topk}")


def test_sinkhorn_of_huge_logits_stays_finite_in_single_precision():
    assert torch.isfinite(sinkhorn(300 * _logits(16).float(), None)).all()


def test_sinkhorn_converges_within_its_iterations():
    """The logits have a standard deviation of 4, which a router without z loss may reach."""
    logits = _logits(512, spread=4.0)
    cost = (logits - logits.amax(dim=1, keepdim=True)).exp()
    columns, rounds, change = torch.ones(EXPERTS, dtype=torch.float64), 0, 1.0
    while change > SINKHORN_TOLERANCE:
        new = 1 / EXPERTS / ((1 / 512 / (cost @ columns)) @ cost)
        columns, change, rounds = new, (new - columns).abs().mean(), rounds + 1
    assert rounds < SINKHORN_ITERATIONS


# quantile balancing


def _slow_thresholds(logits: list[list[float]], thresholds: list[float], topk: int) -> list[float]:
    margins = [sorted((x - b for x, b in zip(row, thresholds, strict=True)), reverse=True)[topk] for row in logits]
    target = len(logits) * topk // len(thresholds)
    columns = [[row[e] - margin for row, margin in zip(logits, margins, strict=True)] for e in range(len(thresholds))]
    return [sorted(column, reverse=True)[target] for column in columns]


def _slow_update(old: list[float], batches: list[list[list[float]]], topk: int, ema: float) -> torch.Tensor:
    found = [_slow_thresholds(batch, old, topk) for batch in batches]
    mean = [sum(column) / len(found) for column in zip(*found, strict=True)]
    moved = [ema * a + (1 - ema) * b for a, b in zip(old, mean, strict=True)]
    centre = sum(moved) / len(moved)
    return torch.tensor([x - centre for x in moved], dtype=torch.float64)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_quantile_thresholds_equal_the_slow_version_over_two_global_batches(ema):
    router = sees_logits(balancing=("quantile_balancing",), quantile_ema=ema)
    old = [0.0] * EXPERTS
    for step in range(2):
        batches = [_logits(16, seed=10 * step + i).tolist() for i in range(3)]
        for batch in batches:
            hidden = logits_as_hidden(batch)
            routing = router(hidden, make_mb(hidden))
            chosen = [best([x - b for x, b in zip(row, old, strict=True)], 2, list(range(EXPERTS))) for row in batch]
            assert routing.ids_TK.tolist() == chosen
        expected = _slow_update(old, batches, 2, ema)
        update_routers([router], router.ctx)
        FP32_REF.check(router.quantile_thresholds, expected, f"thresholds after step {step}")
        old = router.quantile_thresholds.double().tolist()


def test_quantile_weights_are_the_plain_scores():
    router = sees_logits(balancing=("quantile_balancing",), score_function="sigmoid", scaling_factor=2.0)
    router.quantile_thresholds.copy_(torch.arange(8.0) / 4)
    hidden = logits_as_hidden(_logits(6).tolist())
    routing = router(hidden, make_mb(hidden))
    scores = hidden.detach()[:, 0].sigmoid().gather(1, routing.ids_TK)
    FP64_REF.check(routing.probs_TK, 2 * scores / scores.sum(1, keepdim=True), "weights")


def test_quantile_thresholds_are_the_mean_over_ranks():
    batches = [_logits(16, seed=seed).tolist() for seed in (1, 2)]

    def rank(ctx: ParallelContext):
        router, hidden = sees_logits(balancing=("quantile_balancing",), ctx=ctx), logits_as_hidden(batches[ctx.rank])
        router(hidden, make_mb(hidden))
        update_routers([router], ctx)
        return router.quantile_thresholds

    for thresholds in on_threads(ParallelConfig(world_size=2), rank):
        FP32_REF.check(thresholds, _slow_update([0.0] * EXPERTS, batches, 2, 0.0), "thresholds")


# expert choice


def _slow_expert_choice(scores: list[list[float]], capacity: int, tokens: list[int]) -> list[list[bool]]:
    chosen = [[False] * EXPERTS for _ in scores]
    for expert in range(EXPERTS):
        column = [row[expert] for row in scores]
        for t in best(column, capacity, tokens):
            chosen[t][expert] = True
    return chosen


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("factor", "capacity"), [(None, 3), (2.0, 6)])
def test_expert_choice_selects_the_best_tokens_of_every_expert(score_function, factor, capacity):
    """Each of 8 experts selects 12 * 2 / 8 = 3 of 12 tokens, or 6 with a capacity factor of 2."""
    logits = _logits(12)
    hidden = logits_as_hidden(logits.tolist(), batch=2)
    limit = None if factor is None else CapacityConfig(factor=factor)
    router = sees_logits(balancing=("expert_choice",), capacity=limit, score_function=score_function)
    routing = router(hidden, make_mb(hidden))
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(dim=-1, keepdim=True)
    chosen = torch.tensor(_slow_expert_choice(scores.tolist(), capacity, list(range(12))))
    EXACT.check(routing.map_TE, chosen, "map")
    FP64_REF.check(routing.probs_TE, scores * chosen, "weights")
    assert routing.counts_E.tolist() == [capacity] * EXPERTS and routing.capacity == capacity
    assert routing.ids_TK is None and routing.probs_TK is None


def test_expert_choice_ignores_padding():
    logits = _logits(12)
    valid = torch.tensor([[True, False] * 6])
    hidden = logits_as_hidden(logits.tolist())
    routing = sees_logits(balancing=("expert_choice",))(hidden, make_mb(hidden, valid_BS=valid))
    real = [t for t in range(12) if valid[0, t]]
    EXACT.check(routing.map_TE, torch.tensor(_slow_expert_choice(logits.softmax(-1).tolist(), 3, real)), "map")
    few = torch.tensor([[True, True] + [False] * 10])
    routing = sees_logits(balancing=("expert_choice",))(hidden, make_mb(hidden, valid_BS=few))
    assert routing.counts_E.tolist() == [2] * EXPERTS and not routing.map_TE[2:].any()


def test_expert_choice_scales_its_weights_and_has_a_z_loss():
    hidden = make_hidden()
    plain, scaled = (make_router(balancing=("expert_choice",), scaling_factor=f) for f in (None, 3.0))
    FP64_REF.check(scaled(hidden, make_mb(hidden)).probs_TE, 3 * plain(hidden, make_mb(hidden)).probs_TE, "weights")
    with_z = make_router(balancing=("expert_choice",), z_loss_coeff=0.1)
    (with_z(hidden, make_mb(hidden)).probs_TE * 0).sum().backward()
    assert with_z.weight.grad.abs().max() > 0
