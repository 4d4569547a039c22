"""Choice of experts and balancing scores of the reference against one token worked out at a time."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.specs.moe import RouterSpec
from tests.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()
EXPERTS = 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spec_of(**fields) -> RouterSpec:
    return RouterSpec(**{"hidden_size": 1, "num_experts": EXPERTS, "topk": 4, **fields})


def score(logit: float, kind: str) -> float:
    sigmoid = 1 / (1 + math.exp(-logit))
    return sigmoid if kind == "sigmoid" else math.sqrt(math.log1p(math.exp(logit)))


def softmax(values: list[float]) -> list[float]:
    total = sum(map(math.exp, values))
    return [math.exp(value) / total for value in values]


def choose_by_hand(logits: list[float], bias: list[float], spec: RouterSpec) -> tuple[list[int], list[float]]:
    """Ids and weights of one token."""
    after = spec.score_function == "softmax" and not spec.pre_softmax
    if after:
        scores = logits
    else:
        scores = (
            softmax(logits) if spec.score_function == "softmax" else [score(x, spec.score_function) for x in logits]
        )
    merit = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = list(range(spec.num_experts))
    if spec.group_topk:
        size = spec.num_experts // spec.num_groups
        groups = [allowed[g * size : (g + 1) * size] for g in range(spec.num_groups)]
        worth = [
            sum(sorted((merit[e] for e in group), reverse=True)[: spec.topk // spec.group_topk]) for group in groups
        ]
        winners = sorted(range(spec.num_groups), key=lambda g: (-worth[g], g))[: spec.group_topk]
        allowed = [e for g in winners for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-merit[e], e))[: spec.topk]
    weights = [scores[e] for e in ids]
    if after:
        weights = softmax(weights)
    elif spec.score_function != "softmax" and spec.topk > 1:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * (spec.scaling_factor or 1.0) for w in weights]


SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("groups", [(None, None), (4, 2), (3, 3)])
@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("function, pre", SCORES)
def test_experts_are_chosen_and_weighed_as_by_hand(function, pre, scaling, groups, topk) -> None:
    if groups[1] and topk < groups[1]:
        groups = (groups[0], 1)
    spec = spec_of(
        topk=topk,
        score_function=function,
        pre_softmax=pre,
        scaling_factor=scaling,
        num_groups=groups[0],
        group_topk=groups[1],
    )
    logits = 2 * draw(20, EXPERTS)
    bias = draw(EXPERTS, seed=1) / 4 if function != "softmax" else None
    ids, probs = KERNELS.select_experts(logits, bias, spec, None)
    flat_bias = [0.0] * EXPERTS if bias is None else bias.tolist()
    expected = [choose_by_hand(row, flat_bias, spec) for row in logits.tolist()]
    EXACT.check(ids, [row for row, _ in expected], "ids")
    FP64_REF.check(probs, [row for _, row in expected], "probs")


@pytest.mark.parametrize("function, pre", SCORES)
def test_the_bias_moves_the_choice_and_not_the_weights(function, pre) -> None:
    spec, logits = spec_of(score_function=function, pre_softmax=pre, topk=2), draw(6, EXPERTS)
    bias = torch.zeros(EXPERTS)
    bias[[3, 7]] = torch.tensor([10.0, 20.0])
    ids, probs = KERNELS.select_experts(logits, bias, spec, None)
    EXACT.check(ids, torch.tensor([[7, 3]]).expand(6, 2), "the two favoured experts")
    replayed = KERNELS.select_experts(logits, None, spec, ids)[1]
    EXACT.check(probs, replayed, "weights without bias")


@pytest.mark.parametrize("function, pre", SCORES)
def test_equal_scores_go_to_the_lowest_ids(function, pre) -> None:
    spec = spec_of(score_function=function, pre_softmax=pre, num_groups=4, group_topk=2)
    ids, _ = KERNELS.select_experts(torch.zeros(3, EXPERTS), None, spec, None)
    EXACT.check(ids, torch.tensor([[0, 1, 2, 3]]).expand(3, 4))
    EXACT.check(KERNELS.balance_scores(torch.zeros(3, EXPERTS), spec)[1], torch.tensor([[0, 1, 2, 3]]).expand(3, 4))


@pytest.mark.parametrize("function, pre", SCORES)
def test_weights_have_the_gradients_of_finite_differences(function, pre) -> None:
    spec = spec_of(score_function=function, pre_softmax=pre, scaling_factor=1.5)
    logits = draw(3, EXPERTS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KERNELS.select_experts(x, None, spec, None)[1], (logits,))
    assert torch.autograd.gradcheck(lambda x: KERNELS.balance_scores(x, spec)[0], (logits,))


@pytest.mark.parametrize("function, pre", SCORES)
def test_given_ids_are_kept_and_none_gets_weight_zero_and_a_finite_gradient(function, pre) -> None:
    spec = spec_of(score_function=function, pre_softmax=pre)
    given = torch.tensor([[5, -1, 0, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    logits = draw(3, EXPERTS).requires_grad_()
    ids, probs = KERNELS.select_experts(logits, None, spec, given)
    EXACT.check(ids, given, "ids")
    EXACT.check(probs[given < 0], torch.zeros(6), "weights of none")
    if not pre:
        FP64_REF.check(probs.sum(dim=1), [1.0, 0.0, 1.0], "normalised over those that are there")
    probs[given >= 0].square().sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[1].any()


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balance_scores_sum_to_one_and_rank_without_groups(function: str) -> None:
    spec = spec_of(score_function=function, num_groups=4, group_topk=1)
    logits = draw(5, EXPERTS)
    scores, ids = KERNELS.balance_scores(logits, spec)
    for t, row in enumerate(logits.tolist()):
        raw = [math.exp(x) for x in row] if function == "softmax" else [score(x, function) for x in row]
        FP64_REF.check(scores[t], [x / sum(raw) for x in raw], f"scores of token {t}")
        assert ids[t].tolist() == sorted(range(EXPERTS), key=lambda e: -row[e])[:4]


def test_scores_of_extreme_logits_are_finite_with_finite_gradients() -> None:
    for function, pre in SCORES:
        spec = spec_of(score_function=function, pre_softmax=pre)
        logits = torch.tensor([[-90.0] * EXPERTS, [90.0] * EXPERTS], requires_grad=True)
        probs = KERNELS.select_experts(logits, None, spec, None)[1]
        (grad,) = torch.autograd.grad(probs[:, 0].sum(), logits)
        assert probs.isfinite().all() and grad.isfinite().all(), function


def test_bf16_logits_are_scored_in_fp32_and_weights_returned_in_bf16() -> None:
    logits, spec = draw(8, EXPERTS).bfloat16(), spec_of(score_function="sigmoid")
    ids, probs = KERNELS.select_experts(logits, None, spec, None)
    wide_ids, wide = KERNELS.select_experts(logits.float(), None, spec, None)
    EXACT.check(ids, wide_ids, "ids")
    EXACT.check(probs, wide.bfloat16(), "probs")
    assert probs.dtype is torch.bfloat16 and KERNELS.balance_scores(logits, spec)[0].dtype is torch.float32


def test_counts_leave_out_none_and_include_experts_without_tokens() -> None:
    ids = torch.tensor([[0, 3], [3, -1], [-1, -1], [3, 0]])
    EXACT.check(KERNELS.count_tokens(ids, 5), [2, 0, 0, 3, 0])
    EXACT.check(KERNELS.count_tokens(ids[:0], 5), [0, 0, 0, 0, 0])
