"""Expert ids, weights and sums of the router op in plain torch, against a loop over tokens."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.ops import BalanceSums
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()
EXPERTS = 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spec_of(**fields) -> RouterConfig:
    return RouterConfig(**{"hidden_size": 1, "num_experts": EXPERTS, "topk": 4, **fields})


def choose(
    logits: Tensor, bias: Tensor | None, config: RouterConfig, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    routed = KERNELS.route(logits, bias, config, forced_ids_TK=given)
    return routed.ids_TK, routed.probs_TK


def balance_of_each(logits: Tensor, config: RouterConfig) -> BalanceSums:
    """Balance sums with one set per token."""
    balance = KERNELS.route(logits, None, config, balance_sets=len(logits)).balance
    assert balance is not None
    return balance


def score(logit: float, kind: str) -> float:
    sigmoid = 1 / (1 + math.exp(-logit))
    return sigmoid if kind == "sigmoid" else math.sqrt(math.log1p(math.exp(logit)))


def softmax(values: list[float]) -> list[float]:
    total = sum(map(math.exp, values))
    return [math.exp(value) / total for value in values]


def choose_by_hand(logits: list[float], bias: list[float], config: RouterConfig) -> tuple[list[int], list[float]]:
    """Ids and weights of one token."""
    after = config.score_function == "softmax" and not config.pre_softmax
    if after:
        scores = logits
    else:
        scores = (
            softmax(logits) if config.score_function == "softmax" else [score(x, config.score_function) for x in logits]
        )
    merit = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = list(range(config.num_experts))
    if config.group_topk:
        size = config.num_experts // config.num_groups
        groups = [allowed[g * size : (g + 1) * size] for g in range(config.num_groups)]
        worth = [
            sum(sorted((merit[e] for e in group), reverse=True)[: config.topk // config.group_topk]) for group in groups
        ]
        winners = sorted(range(config.num_groups), key=lambda g: (-worth[g], g))[: config.group_topk]
        allowed = [e for g in winners for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-merit[e], e))[: config.topk]
    weights = [scores[e] for e in ids]
    if after:
        weights = softmax(weights)
    elif config.score_function != "softmax" and config.topk > 1:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * (config.scaling_factor or 1.0) for w in weights]


SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("groups", [(None, None), (4, 2), (3, 3)])
@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("function, pre", SCORES)
def test_routing_matches_a_manual_computation(function, pre, scaling, groups, topk) -> None:
    if groups[1] and topk < groups[1]:
        groups = (groups[0], 1)
    config = spec_of(
        topk=topk,
        score_function=function,
        pre_softmax=pre,
        scaling_factor=scaling,
        num_groups=groups[0],
        group_topk=groups[1],
    )
    logits = 2 * draw(20, EXPERTS)
    bias = draw(EXPERTS, seed=1) / 4 if function != "softmax" else None
    ids, probs = choose(logits, bias, config)
    flat_bias = [0.0] * EXPERTS if bias is None else bias.tolist()
    expected = [choose_by_hand(row, flat_bias, config) for row in logits.tolist()]
    EXACT.check(ids, [row for row, _ in expected], "ids")
    FP64_REF.check(probs, [row for _, row in expected], "probs")


@pytest.mark.parametrize("function, pre", SCORES)
def test_expert_bias_changes_the_choice_but_not_the_weights(function, pre) -> None:
    config, logits = spec_of(score_function=function, pre_softmax=pre, topk=2), draw(6, EXPERTS)
    bias = torch.zeros(EXPERTS)
    bias[[3, 7]] = torch.tensor([10.0, 20.0])
    ids, probs = choose(logits, bias, config)
    EXACT.check(ids, torch.tensor([[7, 3]]).expand(6, 2), "the two favoured experts")
    replayed = choose(logits, None, config, ids)[1]
    EXACT.check(probs, replayed, "weights without bias")


@pytest.mark.parametrize("function, pre", SCORES)
def test_ties_select_the_lowest_expert_ids(function, pre) -> None:
    config = spec_of(score_function=function, pre_softmax=pre, num_groups=4, group_topk=2)
    ids, _ = choose(torch.zeros(3, EXPERTS), None, config)
    EXACT.check(ids, torch.tensor([[0, 1, 2, 3]]).expand(3, 4))
    counts = balance_of_each(torch.zeros(3, EXPERTS), config).counts_GE
    EXACT.check(counts, torch.tensor([[1] * 4 + [0] * 8]).expand(3, EXPERTS))


@pytest.mark.parametrize("function, pre", SCORES)
def test_weights_have_the_gradients_of_finite_differences(function, pre) -> None:
    config = spec_of(score_function=function, pre_softmax=pre, scaling_factor=1.5)
    logits = draw(3, EXPERTS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: choose(x, None, config)[1], (logits,))
    assert torch.autograd.gradcheck(lambda x: balance_of_each(x, config).scores_GE, (logits,))
    assert torch.autograd.gradcheck(lambda x: KERNELS.route(x, None, config, z=True).z_sum, (logits,))


@pytest.mark.parametrize("function, pre", SCORES)
def test_replayed_ids_are_kept_and_missing_ids_have_weight_zero(function, pre) -> None:
    config = spec_of(score_function=function, pre_softmax=pre)
    given = torch.tensor([[5, -1, 0, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    logits = draw(3, EXPERTS).requires_grad_()
    ids, probs = choose(logits, None, config, given)
    EXACT.check(ids, given, "ids")
    EXACT.check(probs[given < 0], torch.zeros(6), "weights of none")
    if not pre:
        FP64_REF.check(probs.sum(dim=1), [1.0, 0.0, 1.0], "normalised over those that are there")
    probs[given >= 0].square().sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[1].any()


@pytest.mark.parametrize("score_function, pre_softmax", SCORES)
def test_underflowing_scores_have_zero_gradients(score_function: str, pre_softmax: bool) -> None:
    """Scores that underflow to zero have zero gradients, whether or not their expert is selected."""
    logits = draw(3, EXPERTS).index_fill(1, torch.tensor([0, 5]), -800.0).requires_grad_()
    config = spec_of(score_function=score_function, pre_softmax=pre_softmax)
    routed = KERNELS.route(logits, None, config, balance_sets=1)
    assert routed.balance is not None
    (routed.probs_TK.square().sum() + routed.balance.scores_GE.square().sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[:, [0, 5]].any()


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balance_scores_sum_to_one_and_rank_without_groups(function: str) -> None:
    config = spec_of(score_function=function, num_groups=4, group_topk=2)
    logits = draw(5, EXPERTS)
    scores, counts = balance_of_each(logits, config)
    for t, row in enumerate(logits.tolist()):
        raw = [math.exp(x) for x in row] if function == "softmax" else [score(x, function) for x in row]
        FP64_REF.check(scores[t], [x / sum(raw) for x in raw], f"scores of token {t}")
        assert counts[t].nonzero().flatten().tolist() == sorted(sorted(range(EXPERTS), key=lambda e: -row[e])[:4])


def test_balance_sums_cover_the_valid_tokens_of_each_set() -> None:
    """Six tokens of two sequences, token t of sequence t % 2; one is padding, and its logits may be anything."""
    config, logits = spec_of(num_experts=3, topk=1), draw(6, 3)
    logits[3] = torch.nan
    valid = torch.arange(6) != 3
    routed = KERNELS.route(logits, None, config, valid_T=valid, balance_sets=2, z=True)
    best = logits.argmax(dim=-1)
    assert routed.ids_TK.flatten().tolist() == [-1 if t == 3 else int(best[t]) for t in range(6)]
    EXACT.check(routed.probs_TK.flatten(), valid.double(), "one choice weighs 1, padding nothing")
    assert routed.balance is not None and routed.z_sum is not None
    for of_set, tokens in enumerate(([0, 2, 4], [1, 5])):
        FP64_REF.check(routed.balance.scores_GE[of_set], logits[tokens].softmax(-1).sum(0), f"scores of set {of_set}")
        EXACT.check(routed.balance.counts_GE[of_set], best[tokens].bincount(minlength=3), f"counts of set {of_set}")
    EXACT.check(routed.counts_E, best[valid].bincount(minlength=3), "counts")
    squares = [math.log(sum(map(math.exp, row))) ** 2 for row in logits[valid].tolist()]
    FP64_REF.check(routed.z_sum, sum(squares), "z")


def test_replayed_ids_do_not_change_the_balance_sums() -> None:
    config, logits = spec_of(num_groups=4, group_topk=2), draw(5, EXPERTS)
    free = KERNELS.route(logits, None, config, balance_sets=1, z=True)
    replayed = KERNELS.route(logits, None, config, forced_ids_TK=torch.full((5, 4), -1), balance_sets=1, z=True)
    assert replayed.counts_E.sum() == 0 and free.counts_E.sum() == 20
    assert free.balance is not None and replayed.balance is not None
    for mine, theirs in zip((*replayed.balance, replayed.z_sum), (*free.balance, free.z_sum), strict=True):
        EXACT.check(mine, theirs)


def test_scores_of_extreme_logits_are_finite_with_finite_gradients() -> None:
    for function, pre in SCORES:
        config = spec_of(score_function=function, pre_softmax=pre)
        logits = torch.tensor([[-90.0] * EXPERTS, [90.0] * EXPERTS], requires_grad=True)
        probs = choose(logits, None, config)[1]
        (grad,) = torch.autograd.grad(probs[:, 0].sum(), logits)
        assert probs.isfinite().all() and grad.isfinite().all(), function


def test_bf16_logits_are_scored_in_fp32_and_weights_returned_in_bf16() -> None:
    logits, config = draw(8, EXPERTS).bfloat16(), spec_of(score_function="sigmoid")
    ids, probs = choose(logits, None, config)
    wide_ids, wide = choose(logits.float(), None, config)
    EXACT.check(ids, wide_ids, "ids")
    EXACT.check(probs, wide.bfloat16(), "probs")
    assert probs.dtype is torch.bfloat16 and balance_of_each(logits, config).scores_GE.dtype is torch.float32


def test_counts_exclude_missing_ids_and_include_unused_experts() -> None:
    ids = torch.tensor([[0, 3], [3, -1], [-1, -1], [3, 0]])
    EXACT.check(KERNELS.count_tokens(ids, 5), [2, 0, 0, 3, 0])
    EXACT.check(KERNELS.count_tokens(ids[:0], 5), [0, 0, 0, 0, 0])
