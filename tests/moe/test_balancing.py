"""Balancing losses: their weight in the gradient, the global loss, and the router update once per global batch."""

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe import balancing
from megatron_moe.moe.balancing import update_routers
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.routers import EXPERTS, logits_as_hidden, make_hidden, make_mb, make_router, sees_logits

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
FAR = 40.0
"""Logit that exceeds the others by so much that their softmax is practically zero."""


def _loss(router, hidden, kind, **fields):
    metrics = MetricAccumulator()
    router(hidden, make_mb(hidden, metrics=metrics, **fields))
    return metrics.take_all().entries[NAMES[kind], router.layer].value


def _gradient(router, hidden, **fields):
    """Gradient of the gate from the attached losses only."""
    router.weight.grad = None
    routing = router(hidden, make_mb(hidden, **fields))
    (routing.probs_TK * 0).sum().backward()
    return router.weight.grad.clone()


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_loss_of_collapsed_choices_is_experts_over_k(kind, topk):
    hidden = logits_as_hidden([[FAR] * topk + [-FAR] * (8 - topk)] * 6, batch=2)
    router = sees_logits(topk=topk, pre_softmax=True, balancing=(kind,), aux_loss_coeffs=(0.01,))
    FP64_REF.check(_loss(router, hidden, kind), 8 / topk, "collapsed loss")


def test_losses_ignore_groups_and_expert_bias():
    hidden = make_hidden()
    plain = make_router(score_function="sigmoid", balancing=("aux_loss",), aux_loss_coeffs=(1.0,))
    other = make_router(
        score_function="sigmoid",
        balancing=("aux_loss",),
        aux_loss_coeffs=(1.0,),
        expert_bias=True,
        num_groups=4,
        group_topk=1,
    )
    other.expert_bias.copy_(torch.arange(8.0))
    FP64_REF.check(_loss(other, hidden, "aux_loss"), _loss(plain, hidden, "aux_loss"), "loss")
    FP64_REF.check(_gradient(other, hidden), _gradient(plain, hidden), "gradient")


@pytest.mark.parametrize("fields", [{"balancing": ("aux_loss",), "aux_loss_coeffs": (0.5,)}, {"z_loss_coeff": 0.5}])
def test_losses_are_scaled_by_the_weight_of_the_microbatch(fields):
    router, hidden = make_router(**fields), make_hidden()
    whole = _gradient(router, hidden)
    FP64_REF.check(_gradient(router, hidden, aux_loss_scale=0.25), whole / 4, "a quarter, as a number")
    tokens = torch.tensor(10.0)
    FP64_REF.check(_gradient(router, hidden, aux_loss_scale=tokens), whole * 10, "times its tokens, as a tensor")


def test_global_loss_uses_the_counts_of_all_previous_microbatches():
    """All tokens of the first microbatch select expert 0, all of the second expert 1.

    The microbatches differ in size, which detects an implementation that averages counts instead of adding them.
    """
    router = sees_logits(topk=1, pre_softmax=True, balancing=("global_aux_loss",), aux_loss_coeffs=(1.0,))
    first = logits_as_hidden([[FAR if e == 0 else 0.0 for e in range(8)]] * 6)
    second = logits_as_hidden([[FAR if e == 1 else 0.0 for e in range(8)]] * 2)
    FP64_REF.check(_loss(router, first, "global_aux_loss"), 8.0, "first microbatch")
    FP64_REF.check(_loss(router, second, "global_aux_loss"), 8.0 * 2 / 8, "second: a quarter of the choices so far")
    update_routers([router], router.ctx)
    FP64_REF.check(_loss(router, second, "global_aux_loss"), 8.0, "next global batch starts anew")


def test_global_loss_over_ranks_equals_the_loss_of_one_rank():
    """The mean gradient of two ranks, each with half of the batch, equals the gradient of the whole batch."""
    whole = make_hidden(5, 4)
    fields = {"balancing": ("global_aux_loss",), "aux_loss_coeffs": (0.5,)}
    expected = _gradient(make_router(**fields), whole)
    expected_loss = _loss(make_router(**fields), whole, "global_aux_loss")

    def rank(ctx: ParallelContext):
        half = whole.detach()[:, 2 * ctx.rank : 2 * ctx.rank + 2].clone().requires_grad_()
        gradient = _gradient(make_router(ctx=ctx, **fields), half)
        return gradient, _loss(make_router(ctx=ctx, **fields), half, "global_aux_loss")

    results = on_threads(ParallelConfig(world_size=2), rank)
    FP64_REF.check((results[0][0] + results[1][0]) / 2, expected, "mean gradient")
    FP64_REF.check((results[0][1] + results[1][1]) / 2, expected_loss, "mean loss")
    assert (results[0][0] - results[1][0]).abs().max() > 1e-3


def _biased(**fields):
    return make_router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.25, **fields)


def test_bias_rises_for_experts_below_the_mean_load_and_falls_above_it():
    router = _biased()
    router.tokens_since_update.copy_(torch.tensor([0, 1, 2, 3, 4, 2, 2, 2]))  # the mean is 2
    update_routers([router], router.ctx)
    EXACT.check(router.expert_bias, torch.tensor([0.25, 0.25, 0, -0.25, -0.25, 0, 0, 0]), "bias")
    assert router.expert_bias.dtype == torch.float32 and router.tokens_since_update.sum() == 0


def test_bias_is_updated_once_per_global_batch():
    router = _biased()
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in (2, 3, 4):
        hidden = make_hidden(seed=seed)
        counts += router(hidden, make_mb(hidden)).counts_E
        assert router.expert_bias.abs().max() == 0, "moved before the end of the global batch"
    EXACT.check(router.tokens_since_update, counts, "counts")
    update_routers([router], router.ctx)
    EXACT.check(router.expert_bias, 0.25 * (counts.float().mean() - counts).sign(), "bias")


def test_bias_update_uses_the_load_after_drops():
    """All tokens select experts 0 and 1, each of which has capacity for two tokens."""
    router = _biased(capacity=CapacityConfig(factor=0.5))
    with torch.no_grad():
        router.weight.zero_()
    hidden = make_hidden(8, 2)
    router(hidden, make_mb(hidden))
    assert router.tokens_since_update.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]


def test_bias_affects_selection_and_not_weights():
    router, hidden = _biased(), make_hidden()
    plain = router(hidden, make_mb(hidden))
    router.expert_bias[5] = 100.0
    pulled = router(hidden, make_mb(hidden))
    assert (pulled.ids_TK == 5).any(dim=1).all() and not (plain.ids_TK == 5).any(dim=1).all()
    FP64_REF.check(pulled.probs_TK.sum(dim=1), torch.ones(10), "sums of weights")
    assert pulled.probs_TK.max() <= 1


def test_bad_step_keeps_the_bias_and_resets_the_counts():
    biased = _biased(balancing=("global_aux_loss",), aux_loss_coeffs=(0.1,))
    quantile = make_router(balancing=("quantile_balancing",))
    hidden = make_hidden()
    for apply_update, moves in ((torch.tensor(False), False), (torch.tensor(True), True)):
        for router in (biased, quantile):
            router(hidden, make_mb(hidden))
        update_routers([biased, quantile], biased.ctx, apply_update=apply_update)
        assert (biased.expert_bias.abs().max() > 0) == moves
        assert (quantile.quantile_thresholds.abs().max() > 0) == moves
        for counter in (biased.tokens_since_update, biased.global_counts, quantile.threshold_sums):
            assert counter.abs().max() == 0
        assert quantile.threshold_count == 0


def test_bias_update_sums_over_ranks_in_one_all_reduce(monkeypatch):
    """Expert 0 is overloaded on rank 0, but below the mean load over both ranks, because expert 1 has more tokens."""
    calls = []
    monkeypatch.setattr(
        balancing,
        "all_reduce_",
        lambda flat, group, reduce=balancing.all_reduce_: calls.append(1) or reduce(flat, group),
    )

    def rank(ctx: ParallelContext):
        routers = [_biased(ctx=ctx), make_router(ctx=ctx), make_router(ctx=ctx, balancing=("quantile_balancing",))]
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        counts[ctx.rank] = 8 if ctx.rank == 0 else 1000
        routers[0].tokens_since_update += counts
        update_routers(routers, ctx)
        return routers[0].expert_bias

    for bias in on_threads(ParallelConfig(world_size=2), rank):
        EXACT.check(bias, torch.tensor([0.25, -0.25, *[0.25] * 6]), "bias on every rank")
    assert len(calls) == 2, "one all-reduce per rank"


def test_routers_without_state_communicate_nothing(monkeypatch):
    monkeypatch.setattr(balancing, "all_reduce_", None)
    update_routers([], ParallelContext.single())
    update_routers([make_router()], ParallelContext.single())


def test_bias_and_thresholds_are_saved_and_loaded():
    for fields in ({"score_function": "sigmoid", "expert_bias": True}, {"balancing": ("quantile_balancing",)}):
        router, hidden = make_router(**fields), make_hidden()
        router(hidden, make_mb(hidden))
        update_routers([router], router.ctx)
        fresh = make_router(seed=9, **fields)
        fresh.load_state_dict(router.state_dict())
        for name, buffer in fresh.named_buffers():
            EXACT.check(buffer, dict(router.named_buffers())[name], name)
