"""Scores of the router, choice of experts and their weights: one kernel forward, one backward.

A program holds all experts of a few tokens. Choices are taken one by one, each the largest that is left, so the order
and the ties (the lowest id wins) are those of a stable sort. Groups whose sizes are no powers of two, and replayed
choices, are left to plain torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.triton.launch import power_of_two
from megatron_moe.kernels.reference_routing import EPSILON
from megatron_moe.specs.moe import RouterSpec

TILE = 2048
"""Tokens times experts that one program holds."""


def select_experts(
    logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec, given_ids_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `Kernels.select_experts`."""
    if given_ids_TK is not None or not _groups_fit(spec) or logits_TE.dtype is torch.float64:
        return reference.select_experts(logits_TE, bias_E, spec, given_ids_TK)
    ids_TK, probs_TK = _SelectExperts.apply(logits_TE, bias_E, spec)  # type: ignore[no-untyped-call]
    return ids_TK, probs_TK


def balance_scores(logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """See `Kernels.balance_scores`."""
    if logits_TE.dtype is torch.float64:
        return reference.balance_scores(logits_TE, spec)
    scores_TE, ids_TK = _BalanceScores.apply(logits_TE, spec)  # type: ignore[no-untyped-call]
    return scores_TE, ids_TK


def _groups_fit(spec: RouterSpec) -> bool:
    if spec.group_topk is None:
        return True
    groups = spec.num_groups or 1
    return power_of_two(groups) == groups and power_of_two(spec.num_experts) == spec.num_experts


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        num_tokens, num_experts = logits_TE.shape
        ids_TK = torch.empty(num_tokens, spec.topk, device=logits_TE.device, dtype=torch.int64)
        probs_TK = torch.empty(num_tokens, spec.topk, device=logits_TE.device, dtype=logits_TE.dtype)
        experts, tokens = _tile(num_experts)
        if num_tokens:
            _select_experts_forward[(triton.cdiv(num_tokens, tokens),)](
                logits_TE, logits_TE if bias_E is None else bias_E, ids_TK, probs_TK, num_tokens, num_experts,
                _scaling(spec), EPSILON, BIASED=bias_E is not None, TOPK=spec.topk, **_kind(spec),
                GROUPS=spec.num_groups or 1, GROUP_TOPK=spec.group_topk or 0, TOKENS=tokens, EXPERTS=experts,
            )  # fmt: skip
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.spec = spec
        ctx.mark_non_differentiable(ids_TK)
        return ids_TK, probs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, ids_TK = ctx.saved_tensors
        spec: RouterSpec = ctx.spec
        num_tokens, num_experts = logits_TE.shape
        grad_TE = torch.empty_like(logits_TE)
        experts, tokens = _tile(num_experts)
        if num_tokens:
            _select_experts_backward[(triton.cdiv(num_tokens, tokens),)](
                grads[1].contiguous(), logits_TE, ids_TK, grad_TE, num_tokens, num_experts, _scaling(spec), EPSILON,
                TOPK=spec.topk, **_kind(spec), TOKENS=tokens, EXPERTS=experts,
            )  # fmt: skip
        return grad_TE, None, None


class _BalanceScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        num_tokens, num_experts = logits_TE.shape
        ids_TK = torch.empty(num_tokens, spec.topk, device=logits_TE.device, dtype=torch.int64)
        scores_TE = torch.empty(num_tokens, num_experts, device=logits_TE.device, dtype=torch.float32)
        experts, tokens = _tile(num_experts)
        if num_tokens:
            _balance_scores_forward[(triton.cdiv(num_tokens, tokens),)](
                logits_TE, scores_TE, ids_TK, num_tokens, num_experts, EPSILON, TOPK=spec.topk,
                SCORE=spec.score_function, TOKENS=tokens, EXPERTS=experts,
            )  # fmt: skip
        ctx.save_for_backward(logits_TE)
        ctx.spec = spec
        ctx.mark_non_differentiable(ids_TK)
        return scores_TE, ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits_TE,) = ctx.saved_tensors
        num_tokens, num_experts = logits_TE.shape
        grad_TE = torch.empty_like(logits_TE)
        experts, tokens = _tile(num_experts)
        if num_tokens:
            # the gradient is often one row for all tokens, seen through a stride of 0
            _balance_scores_backward[(triton.cdiv(num_tokens, tokens),)](
                grads[0], logits_TE, grad_TE, num_tokens, num_experts, *grads[0].stride(), EPSILON,
                SCORE=ctx.spec.score_function, TOKENS=tokens, EXPERTS=experts,
            )  # fmt: skip
        return grad_TE, None


def _tile(num_experts: int) -> tuple[int, int]:
    """(experts, tokens)"""
    experts = power_of_two(num_experts)
    return experts, max(TILE // experts, 1)


def _kind(spec: RouterSpec) -> dict[str, Any]:
    return {
        "SCORE": spec.score_function,
        "ON_LOGITS": spec.score_function == "softmax" and not spec.pre_softmax,
        "NORMALISED": spec.score_function != "softmax" and spec.topk > 1,
    }


def _scaling(spec: RouterSpec) -> float:
    return 1.0 if spec.scaling_factor is None else float(spec.scaling_factor)


@triton.jit
def _load_logits(logits_ptr, tokens, experts, num_tokens, num_experts):
    held = (tokens < num_tokens)[:, None] & (experts < num_experts)[None, :]
    place = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    return tl.load(logits_ptr + place, mask=held, other=float("-inf")).to(tl.float32)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _score(logits, experts, num_experts, SCORE: tl.constexpr):
    """Scores of all experts, 0 in columns that are none."""
    if SCORE == "softmax":
        peak = tl.max(logits, axis=1)
        shifted = tl.exp(logits - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        total = tl.sum(shifted, axis=1)
        scores = shifted / tl.where(total == 0.0, 1.0, total)[:, None]
    elif SCORE == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        scores = tl.sqrt(_softplus(logits))
    return tl.where((experts < num_experts)[None, :], scores, 0.0)


@triton.jit
def _slope(logits, scores, SCORE: tl.constexpr):
    """d score / d logit of the scores that are taken one by one."""
    if SCORE == "sigmoid":
        return scores * (1.0 - scores)
    else:
        return tl.where(scores > 0.0, tl.sigmoid(logits) / (2.0 * scores), 0.0)


@triton.jit
def _best(ranking, experts, EXPERTS: tl.constexpr):
    """The lowest id among the largest."""
    peak = tl.max(ranking, axis=1)
    return peak, tl.min(tl.where(ranking == peak[:, None], experts[None, :], EXPERTS), axis=1)


@triton.jit
def _limit_to_groups(
    ranking, experts, TOPK: tl.constexpr, GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Minus infinity outside the best groups; a group is worth the sum of its TOPK // GROUP_TOPK best experts."""
    size: tl.constexpr = EXPERTS // GROUPS
    members = tl.reshape(ranking, (TOKENS * GROUPS, size))
    places = tl.arange(0, size)
    worth = tl.zeros((TOKENS * GROUPS,), dtype=tl.float32)
    for _ in tl.static_range(TOPK // GROUP_TOPK):
        peak, place = _best(members, places, size)
        worth += peak
        members = tl.where(places[None, :] == place[:, None], float("-inf"), members)
    worth = tl.reshape(worth, (TOKENS, GROUPS))
    groups = tl.arange(0, GROUPS)
    chosen = tl.zeros((TOKENS, GROUPS), dtype=tl.int32)
    for _ in tl.static_range(GROUP_TOPK):
        peak, group = _best(worth, groups, GROUPS)
        hit = groups[None, :] == group[:, None]
        chosen = tl.where(hit, 1, chosen)
        worth = tl.where(hit, float("-inf"), worth)
    allowed = tl.broadcast_to(tl.expand_dims(chosen, 2), (TOKENS, GROUPS, size))
    return tl.where(tl.reshape(allowed, (TOKENS, EXPERTS)) != 0, ranking, float("-inf"))


@triton.jit
def _select_experts_forward(
    logits_ptr, bias_ptr, ids_ptr, probs_ptr, num_tokens, num_experts, scaling, epsilon,
    BIASED: tl.constexpr, TOPK: tl.constexpr, SCORE: tl.constexpr, ON_LOGITS: tl.constexpr, NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    logits = _load_logits(logits_ptr, tokens, experts, num_tokens, num_experts)
    if ON_LOGITS:
        scores = logits
    else:
        scores = _score(logits, experts, num_experts, SCORE)
    ranking = scores
    if BIASED:
        bias = tl.load(bias_ptr + experts, mask=experts < num_experts, other=0.0).to(tl.float32)
        ranking += bias[None, :]
    ranking = tl.where((experts < num_experts)[None, :], ranking, float("-inf"))
    if GROUP_TOPK > 0:
        ranking = _limit_to_groups(ranking, experts, TOPK, GROUPS, GROUP_TOPK, TOKENS, EXPERTS)
    left = tl.zeros((TOKENS, EXPERTS), dtype=tl.int32) + (experts < num_experts)[None, :].to(tl.int32)
    total = tl.zeros((TOKENS,), dtype=tl.float32)
    first = tl.zeros((TOKENS,), dtype=tl.float32)
    place = tokens.to(tl.int64) * TOPK
    inside = tokens < num_tokens
    # the choices, and what their weights are divided by
    for k in tl.static_range(TOPK):
        peak = tl.max(tl.where(left != 0, ranking, float("-inf")), axis=1)
        best = (left != 0) & (ranking == peak[:, None])
        expert = tl.min(tl.where(best, experts[None, :], EXPERTS), axis=1)
        hit = experts[None, :] == expert[:, None]
        left = tl.where(hit, 0, left)
        chosen = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        if ON_LOGITS:
            if k == 0:
                first = chosen
            total += tl.exp(chosen - first)
        else:
            total += chosen
        tl.store(ids_ptr + place + k, expert.to(tl.int64), mask=inside)
    taken = (left == 0) & (experts < num_experts)[None, :]
    if ON_LOGITS:
        weights = tl.exp(scores - first[:, None]) / total[:, None] * scaling
    elif NORMALISED:
        weights = scores / (total + epsilon)[:, None] * scaling
    else:
        weights = scores * scaling
    weights = tl.where(taken, weights, 0.0)
    # a second round over the choices, because the weights are known only now
    for k in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + place + k, mask=inside, other=0)
        weight = tl.sum(tl.where(experts[None, :] == expert[:, None], weights, 0.0), axis=1)
        tl.store(probs_ptr + place + k, weight.to(probs_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _select_experts_backward(
    grad_ptr, logits_ptr, ids_ptr, grad_logits_ptr, num_tokens, num_experts, scaling, epsilon,
    TOPK: tl.constexpr, SCORE: tl.constexpr, ON_LOGITS: tl.constexpr, NORMALISED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    inside = tokens < num_tokens
    logits = _load_logits(logits_ptr, tokens, experts, num_tokens, num_experts)
    grad = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
    taken = tl.zeros((TOKENS, EXPERTS), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + tokens.to(tl.int64) * TOPK + k, mask=inside, other=-1)
        each = tl.load(grad_ptr + tokens.to(tl.int64) * TOPK + k, mask=inside, other=0.0).to(tl.float32) * scaling
        hit = experts[None, :] == expert[:, None]
        grad += tl.where(hit, each[:, None], 0.0)
        taken = tl.where(hit, 1, taken)
    if ON_LOGITS:
        among = tl.where(taken != 0, logits, float("-inf"))
        weights = _score(among, experts, num_experts, "softmax")
        grad = weights * (grad - tl.sum(weights * grad, axis=1)[:, None])
    else:
        scores = _score(logits, experts, num_experts, SCORE)
        if NORMALISED:
            total = tl.sum(tl.where(taken != 0, scores, 0.0), axis=1)[:, None] + epsilon
            pulled = tl.sum(scores * grad, axis=1)[:, None] / total
            grad = tl.where(taken != 0, (grad - pulled) / total, 0.0)
        if SCORE == "softmax":
            grad = scores * (grad - tl.sum(scores * grad, axis=1)[:, None])
        else:
            grad *= _slope(logits, scores, SCORE)
    held = inside[:, None] & (experts < num_experts)[None, :]
    place = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    tl.store(grad_logits_ptr + place, grad.to(grad_logits_ptr.dtype.element_ty), mask=held)


@triton.jit
def _balance_scores_forward(
    logits_ptr, scores_ptr, ids_ptr, num_tokens, num_experts, epsilon,
    TOPK: tl.constexpr, SCORE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    inside = tokens < num_tokens
    logits = _load_logits(logits_ptr, tokens, experts, num_tokens, num_experts)
    scores = _score(logits, experts, num_experts, SCORE)
    if SCORE != "softmax":
        scores = scores / (tl.sum(scores, axis=1) + epsilon)[:, None]
    held = inside[:, None] & (experts < num_experts)[None, :]
    tl.store(scores_ptr + tokens[:, None].to(tl.int64) * num_experts + experts[None, :], scores, mask=held)
    ranking = tl.where((experts < num_experts)[None, :], scores, -1.0)
    for k in tl.static_range(TOPK):
        peak, expert = _best(ranking, experts, EXPERTS)
        ranking = tl.where(experts[None, :] == expert[:, None], -1.0, ranking)
        tl.store(ids_ptr + tokens.to(tl.int64) * TOPK + k, expert.to(tl.int64), mask=inside)


@triton.jit
def _balance_scores_backward(
    grad_ptr, logits_ptr, grad_logits_ptr, num_tokens, num_experts, grad_stride_t, grad_stride_e, epsilon,
    SCORE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    held = (tokens < num_tokens)[:, None] & (experts < num_experts)[None, :]
    logits = _load_logits(logits_ptr, tokens, experts, num_tokens, num_experts)
    from_ptr = grad_ptr + tokens[:, None].to(tl.int64) * grad_stride_t + experts[None, :] * grad_stride_e
    grad = tl.load(from_ptr, mask=held, other=0.0).to(tl.float32)
    scores = _score(logits, experts, num_experts, SCORE)
    if SCORE == "softmax":
        grad = scores * (grad - tl.sum(scores * grad, axis=1)[:, None])
    else:
        total = tl.sum(scores, axis=1)[:, None] + epsilon
        grad = (grad - tl.sum(scores * grad, axis=1)[:, None] / total) / total * _slope(logits, scores, SCORE)
    place = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    tl.store(grad_logits_ptr + place, grad.to(grad_logits_ptr.dtype.element_ty), mask=held)
