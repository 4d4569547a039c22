"""Router: precision, jitter, forced logits, replay, padding, metrics and state."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.routers import EXPERTS, logits_as_hidden, make_hidden, make_mb, make_router, sees_logits

ALL_LOSSES = {
    "balancing": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "aux_loss_coeffs": (0.3, 0.2, 0.1),
    "z_loss_coeff": 0.05,
}
KEY = RNGKey(1234, 7, 2)


def test_state_dict_has_parameters_and_expert_bias():
    router = make_router(score_function="sigmoid", expert_bias=True, linear_bias=True, ctx=_bf16())
    saved = {name: (tuple(value.shape), value.dtype) for name, value in router.state_dict().items()}
    assert saved == {
        "weight": ((EXPERTS, 4), torch.bfloat16),
        "bias": ((EXPERTS,), torch.bfloat16),
        "expert_bias": ((EXPERTS,), torch.float32),
    }
    assert not router.bias.meta.decay and router.weight.meta.role == "router"


@pytest.mark.parametrize("scaling", [None, 1.5])
def test_hash_layers_equal_those_of_hugging_face(scaling):
    vocab, config = 50, {"num_experts_per_tok": 3, "n_routed_experts": EXPERTS, "hidden_size": 4}
    theirs = DeepseekV4HashRouter(
        DeepseekV4Config(vocab_size=vocab, routed_scaling_factor=scaling or 1.0, **config)
    ).double()
    ours = make_router(topk=3, score_function="sqrtsoftplus", scaling_factor=scaling, hash_vocab_size=vocab)
    assert ours.expert_table[[0, 7, 49]].tolist() == [[0, 1, 2], [7, 0, 1], [1, 2, 3]], "K experts from the id on"
    with torch.no_grad():
        table = torch.rand(vocab, EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)[:, :3]
        ours.expert_table.copy_(table)
        theirs.tid2eid.copy_(table)
        theirs.weight.copy_(ours.weight)
    hidden = make_hidden()
    ids_BS = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(3))
    mb = make_mb(hidden)
    routing = ours(hidden, replace(mb, tokens=replace(mb.tokens, ids_BS=ids_BS)))
    _, weights, indices = theirs(hidden, ids_BS.t())
    assert torch.equal(routing.ids_TK, indices)
    FP64_REF.check(routing.probs_TK, weights, "probabilities")
    factors = torch.arange(30.0, dtype=torch.float64).view(10, 3)
    for probs in (routing.probs_TK, weights):
        (probs * factors).sum().backward()
    FP64_REF.check(ours.weight.grad, theirs.weight.grad, "gradient of the router")


def test_forced_balance_also_replaces_the_table_of_hash_layers():
    hidden = make_hidden()
    forced, free = (make_router(hash_vocab_size=9 if on else None, force_balancing=True) for on in (True, False))
    mb = make_mb(hidden, rng=RNGKey(1, 2, 3))
    assert torch.equal(forced(hidden, mb).ids_TK, free(hidden, mb).ids_TK)


def test_state_dict_has_no_running_counts():
    assert set(make_router(**ALL_LOSSES).state_dict()) == {"weight"}
    quantile = make_router(balancing=("quantile_balancing",))
    assert set(quantile.state_dict()) == {"weight", "quantile_thresholds"}


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_ties_select_the_lowest_expert_ids(score_function):
    router = sees_logits(score_function=score_function, topk=3)
    hidden = logits_as_hidden([[0.0] * 8, [1, 2, 2, 0, 2, 0, 1, 0]])
    routing = router(hidden, make_mb(hidden))
    assert routing.ids_TK.tolist() == [[0, 1, 2], [1, 2, 4]]


@pytest.mark.parametrize(
    "fields",
    [
        {"balancing": ("sinkhorn",)},
        {"balancing": ("quantile_balancing",)},
        {"balancing": ("expert_choice",)},
        {"topk": 1, "balancing": ("sinkhorn",)},
    ],
)
def test_gradients_equal_finite_differences(fields):
    router, hidden = make_router(**fields), make_hidden(3, 1)

    def weights(x, *_):
        routing = router(x, make_mb(x))
        return routing.probs_TE if routing.probs_TK is None else routing.probs_TK

    torch.autograd.gradcheck(weights, (hidden, *router.parameters()))


def test_gate_multiplies_in_the_router_dtype_with_gradients_in_the_parameter_dtype():
    ctx = _bf16()
    hidden = make_hidden(dtype=torch.bfloat16)
    narrow, wide = make_router(ctx=ctx), make_router(ctx=ctx, dtype="fp32")
    exact = hidden.detach().double().flatten(0, 1) @ wide.weight.detach().double().T
    errors = []
    for router in (narrow, wide):
        routing = router(hidden, make_mb(hidden), exact.topk(2).indices)
        errors.append((routing.probs_TK.double() - exact.topk(2).values.softmax(-1)).abs().max())
        routing.probs_TK[:, 0].sum().backward()
        assert router.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    assert narrow(hidden, make_mb(hidden)).probs_TK.dtype == torch.bfloat16
    assert wide(hidden, make_mb(hidden)).probs_TK.dtype == torch.float32
    assert errors[1] < 1e-6 < 1e-4 < errors[0]


def test_gate_saves_its_input_in_its_own_dtype_for_backward():
    hidden = make_hidden(dtype=torch.bfloat16)
    router = make_router(ctx=_bf16(), dtype="fp32")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        router._logits(hidden, make_mb(hidden))
    assert {tuple(x.shape) for x in kept} == {(10, 4), (EXPERTS, 4)}
    assert all(x.dtype == torch.bfloat16 for x in kept)


def test_jitter_follows_its_key_and_is_off_in_evaluation():
    router, hidden = make_router(input_jitter_eps=0.1), make_hidden()
    plain = router(hidden, make_mb(hidden)).probs_TK
    first = router(hidden, make_mb(hidden, rng=KEY)).probs_TK
    EXACT.check(router(hidden, make_mb(hidden, rng=KEY)).probs_TK, first, "same key")
    EXACT.check(router(hidden, make_mb(hidden, rng=KEY, training=False)).probs_TK, plain, "evaluation")
    other = router(hidden, make_mb(hidden, rng=RNGKey(1234, 7, 3))).probs_TK
    assert not torch.equal(first, plain) and not torch.equal(first, other)


def test_jitter_changes_inputs_by_at_most_eps():
    router = sees_logits(input_jitter_eps=0.1)
    hidden = logits_as_hidden([[1.0] * 8] * 200)
    factor = router._logits(hidden, make_mb(hidden, rng=KEY))
    assert 0.9 <= factor.min() < 0.905 and 1.095 < factor.max() <= 1.1


def test_forced_balance_is_even_and_the_gate_has_a_gradient():
    router, hidden = make_router(force_balancing=True), make_hidden(500, 2)
    with torch.no_grad():
        router.weight.fill_(0)
    routing = router(hidden, make_mb(hidden, rng=KEY))
    assert 200 < routing.counts_E.min() and routing.counts_E.max() < 300
    routing.probs_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().min() > 0


def test_forced_logits_pass_their_gradient_to_the_gate():
    router, hidden = make_router(force_balancing=True), make_hidden()
    noise = router._logits(hidden, make_mb(hidden, rng=KEY))
    push = torch.arange(noise.numel(), dtype=torch.float64).view_as(noise)
    noise.backward(push)
    FP64_REF.check(router.weight.grad, push.T @ hidden.detach().flatten(0, 1), "gate gradient")


def test_forced_noise_differs_between_microbatches_and_layers():
    hidden = make_hidden()
    router = make_router(force_balancing=True)
    keys = RNGKey(1, 1, 0), RNGKey(1, 1, 1), RNGKey(1, 2, 0)
    draws = [router._logits(hidden, make_mb(hidden, rng=key)) for key in keys]
    draws.append(make_router(force_balancing=True, layer=4)._logits(hidden, make_mb(hidden, rng=RNGKey(1, 1, 0))))
    assert len({draw[0, 0].item() for draw in draws}) == 4
    EXACT.check(router._logits(hidden, make_mb(hidden)), router._logits(hidden, make_mb(hidden)), "evaluation")


def _forced_bias(router, key):
    hidden = make_hidden(3000, 1)
    return router._logits(hidden, make_mb(hidden, rng=key)).detach().mean(dim=0)


def test_forced_bias_is_common_to_ranks_and_redrawn_every_step():
    router = make_router(force_biased=2.0)
    first, other_rank, next_step = (_forced_bias(router, RNGKey(1, *key)) for key in ((5, 0), (5, 1), (6, 0)))
    assert (first - other_rank).abs().max() < 0.15 < 1 < (first - next_step).abs().max()
    assert 0.5 < first.std() < 4


def test_negative_forced_bias_is_fixed_for_the_run():
    router = make_router(force_biased=-2.0)
    first, next_step = (_forced_bias(router, RNGKey(1, *key)) for key in ((5, 0), (6, 0)))
    assert (first - next_step).abs().max() < 0.15 < 1 < first.abs().max()


def _forced_load(key, *, skew=3.0, layer=3, num_experts=32, topk=4, part=slice(None), **fields):
    """Ratio of each expert's load to the mean load under forced imbalance."""
    router = make_router(force_skew=skew, layer=layer, num_experts=num_experts, topk=topk, **fields)
    hidden = make_hidden(8000, 1)
    counts = router(hidden, make_mb(hidden, rng=RNGKey(1, *key))).counts_E[part]
    return counts * num_experts / (topk * len(hidden))


@pytest.mark.parametrize("fields", [{}, {"score_function": "sigmoid", "expert_bias": True}])
@pytest.mark.parametrize(("skew", "num_experts", "topk"), [(1.5, 64, 6), (4.4, 64, 6), (8.0, 128, 8), (3.0, 8, 2)])
def test_forced_skew_is_the_load_of_the_busiest_expert(skew, num_experts, topk, fields):
    load = _forced_load((5, 0), skew=skew, num_experts=num_experts, topk=topk, **fields)
    assert load.max() == pytest.approx(skew, rel=0.05)


def test_forced_skew_is_common_to_ranks_and_redrawn_for_every_step_and_layer():
    first, other_rank, next_step = (_forced_load(key) for key in ((5, 0), (5, 1), (6, 0)))
    assert (first - other_rank).abs().max() < 0.2 and not torch.equal(first, other_rank)
    EXACT.check(_forced_load((5, 0)), first, "the same step")
    for other in (next_step, _forced_load((5, 0), layer=4)):
        assert (first - other).abs().max() > 1


@pytest.mark.parametrize(
    ("capacity", "fields"),
    [
        (None, {}),
        (CapacityConfig(factor=0.5), {"score_function": "sigmoid", "expert_bias": True}),
        (None, {"balancing": ("sinkhorn",)}),
        (None, {"balancing": ("quantile_balancing",)}),
    ],
)
def test_given_ids_replay_a_routing(capacity, fields):
    router, hidden = make_router(capacity=capacity, **fields), make_hidden()
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = False
    mb = make_mb(hidden, valid_BS=valid)
    first = router(hidden, mb)
    replayed = router(hidden, mb, first.chosen_TK)
    for name in ("ids_TK", "probs_TK", "counts_E", "chosen_TK"):
        EXACT.check(getattr(replayed, name), getattr(first, name), name)
    with torch.no_grad():
        router.weight.mul_(-1)
    EXACT.check(router(hidden, mb, first.chosen_TK).chosen_TK, first.chosen_TK, "ids with other weights")
    assert not torch.equal(router(hidden, mb).chosen_TK, first.chosen_TK)


def test_evaluation_has_no_counts_metrics_or_losses():
    router = make_router(score_function="sigmoid", expert_bias=True, **ALL_LOSSES)
    hidden, metrics = make_hidden(), MetricAccumulator()
    routing = router(hidden, make_mb(hidden, metrics=metrics, training=False))
    assert not metrics.take_all().entries
    assert router.tokens_since_update.sum() == 0 and router.global_counts.sum() == 0
    (routing.probs_TK * 0).sum().backward()
    assert router.weight.grad.abs().max() == 0


def test_recomputed_forward_counts_and_records_once():
    """The first forward records metrics without gradients, the second has gradients and no metrics.

    Forwards of other microbatches run between the two, in another order.
    """
    fields = {"score_function": "sigmoid", "expert_bias": True, **ALL_LOSSES}
    whole, split, hidden = make_router(**fields), make_router(**fields), make_hidden()
    metrics, microbatches = (MetricAccumulator(), MetricAccumulator()), [make_hidden(seed=seed) for seed in range(3)]
    for microbatch in microbatches:
        _objective(whole, microbatch, make_mb(hidden, metrics=metrics[0]))
    mbs = [make_mb(hidden, rng=RNGKey(number, 0, 0)) for number in range(3)]
    with torch.no_grad():
        firsts = [split(x, replace(mb, metrics=metrics[1])) for x, mb in zip(microbatches, mbs, strict=True)]
    for number in (2, 0, 1):
        second = _objective(split, microbatches[number], mbs[number])
        EXACT.check(second.ids_TK, firsts[number].ids_TK, "choices")
    FP64_REF.check(split.weight.grad, whole.weight.grad, "gradient")
    assert whole.tokens_since_update.sum() > 0, "the counters of the test's own model"
    EXACT.check(split.tokens_since_update, whole.tokens_since_update, "load for the bias")
    EXACT.check(split.global_counts, whole.global_counts, "counts for the global loss")
    plain, recomputed = (accumulator.take_all().entries for accumulator in metrics)
    assert plain.keys() == recomputed.keys()
    for key, entry in plain.items():
        EXACT.check(recomputed[key].value, entry.value, f"{key}")
        EXACT.check(recomputed[key].count, entry.count, f"count of {key}")


@pytest.mark.parametrize("balancing", ["sinkhorn", "quantile_balancing"])
def test_recomputed_selection_is_the_same(balancing):
    router, hidden = make_router(balancing=(balancing,)), make_hidden()
    with torch.no_grad():
        first = router(hidden, make_mb(hidden))
    EXACT.check(router(hidden, make_mb(hidden)).ids_TK, first.ids_TK, "choices")


def _objective(router, hidden, mb):
    """Runs the backward of a weighted sum of all probabilities and of the attached losses."""
    routing = router(hidden, mb)
    push = torch.arange(1, routing.probs_TK.numel() + 1, dtype=torch.float64).view_as(routing.probs_TK)
    (routing.probs_TK * push).sum().backward()
    return routing


@pytest.mark.parametrize(
    "fields",
    [
        {**ALL_LOSSES},
        {**ALL_LOSSES, "score_function": "sigmoid", "expert_bias": True},
        {"balancing": ("sinkhorn",), "z_loss_coeff": 0.1},
        {"balancing": ("quantile_balancing",), "z_loss_coeff": 0.1},
    ],
)
def test_appended_padding_changes_nothing(fields):
    """Four sequences of five tokens give the same results with three more positions and a fifth sequence of padding."""
    router, padded_router = make_router(**fields), make_router(**fields)
    hidden = make_hidden(5, 4)
    metrics, padded_metrics = MetricAccumulator(), MetricAccumulator()
    routing = _objective(router, hidden, make_mb(hidden, metrics=metrics))

    padded = torch.full((8, 5, 4), 3.0, dtype=torch.float64)
    padded[:5, :4] = hidden.detach()
    padded.requires_grad_()
    valid = torch.zeros(5, 8, dtype=torch.bool)
    valid[:4, :5] = True
    mb = make_mb(padded, metrics=padded_metrics, valid_BS=valid)
    padded_routing = padded_router(padded, mb)
    real_T = valid.t().reshape(-1)
    push = torch.arange(1, routing.probs_TK.numel() + 1, dtype=torch.float64).view_as(routing.probs_TK)
    (padded_routing.probs_TK[real_T] * push).sum().backward()

    EXACT.check(padded_routing.ids_TK[real_T], routing.ids_TK, "ids")
    FP64_REF.check(padded_routing.probs_TK[real_T], routing.probs_TK, "weights")
    EXACT.check(padded_routing.counts_E, routing.counts_E, "counts")
    assert (padded_routing.ids_TK[~real_T] == -1).all() and (padded_routing.probs_TK[~real_T] == 0).all()
    FP64_REF.check(padded_router.weight.grad, router.weight.grad, "gate gradient")
    FP64_REF.check(padded.grad[:5, :4], hidden.grad, "input gradient")
    assert padded.grad[5:].abs().max() == 0 and padded.grad[:, 4].abs().max() == 0
    padded_entries = padded_metrics.take_all().entries
    for key, entry in metrics.take_all().entries.items():
        FP64_REF.check(padded_entries[key].value, entry.value, str(key))
    for name, buffer in router.named_buffers():
        FP64_REF.check(dict(padded_router.named_buffers())[name], buffer, name)


def test_microbatch_of_padding_has_finite_losses_and_zero_gradients():
    for fields in (ALL_LOSSES, {"balancing": ("sinkhorn",)}, {"balancing": ("quantile_balancing",)}):
        router, hidden, metrics = make_router(**fields), make_hidden(), MetricAccumulator()
        mb = make_mb(hidden, metrics=metrics, valid_BS=torch.zeros(2, 5, dtype=torch.bool))
        _objective(router, hidden, mb)
        assert router.weight.grad.abs().max() == 0
        assert all(torch.isfinite(entry.value).all() for entry in metrics.take_all().entries.values())


def _bf16() -> ParallelContext:
    return ParallelContext.single(dtype=torch.bfloat16)
