"""Ways to choose experts that look at all tokens at once: Sinkhorn, quantile balancing, expert choice.

They choose; the weights of Sinkhorn and expert choice are made here too, those of quantile balancing by the ordinary
score function. None of them reads the host.
"""

import torch
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.kernels.reference_routing import balance_scores, top_ids
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.exchange import AllGather, run

SINKHORN_TOLERANCE = 1e-4
"""Bound of the mean change of the expert scales between two iterations (Megatron's)."""
SINKHORN_ITERATIONS = 64
"""Iterations; after the tolerance is met they change nothing, which avoids a host synchronisation."""
_SINKHORN_EPS = 1e-8


# Sinkhorn (BASE layers, arXiv 2103.16716; Clark et al., arXiv 2202.01169)


def sinkhorn_choice(
    logits_TE: Tensor, topk: int, valid_T: Tensor | None, given_ids_TK: Tensor | None, *, balance: bool
) -> tuple[Tensor, Tensor]:
    """(ids_TK, probs_TK): choices by the balanced matrix in training (`balance`), by the weights in evaluation.

    The weight of a choice is sigmoid(logit) for k = 1 and otherwise its softmax over all experts, not normalised again.
    """
    wide_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    weights_TE = wide_TE.sigmoid() if topk == 1 else wide_TE.softmax(dim=-1)
    ids_TK = given_ids_TK
    if ids_TK is None:
        ids_TK = top_ids(sinkhorn(wide_TE.detach(), valid_T) if balance else weights_TE.detach(), topk)
    probs_TK = weights_TE.gather(-1, ids_TK.clamp(min=0)).masked_fill(ids_TK < 0, 0)
    return ids_TK, probs_TK.to(logits_TE.dtype)


def sinkhorn(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """exp(logits) with rows and columns scaled in turn until rows sum to 1 / T and columns to 1 / E -> [T, E].

    Padding tokens (`valid_T` False) hold nothing and get zeros.
    """
    # A factor per row is absorbed by that row's scale; taking out the largest keeps exp finite.
    cost_TE = (logits_TE - logits_TE.amax(dim=-1, keepdim=True)).exp()
    if valid_T is not None:
        cost_TE = cost_TE * valid_T[:, None]
    num_tokens = _num_valid(valid_T, cost_TE).clamp(min=1)
    num_experts = cost_TE.shape[1]
    scales_E = cost_TE.new_ones(num_experts)
    scales_T = cost_TE.new_ones(len(cost_TE))
    running = torch.ones((), dtype=torch.bool, device=cost_TE.device)
    for _ in range(SINKHORN_ITERATIONS):
        new_T = 1 / (num_tokens * (cost_TE @ scales_E + _SINKHORN_EPS))
        new_E = 1 / (num_experts * (new_T @ cost_TE + _SINKHORN_EPS))
        change = (new_E - scales_E).abs().mean()
        scales_T = torch.where(running, new_T, scales_T)
        scales_E = torch.where(running, new_E, scales_E)
        running = running & (change > SINKHORN_TOLERANCE)
    return cost_TE * scales_T[:, None] * scales_E


# quantile balancing (kexue.fm/archives/11619)


def quantile_choice(logits_TE: Tensor, thresholds_E: Tensor, topk: int) -> Tensor:
    """ids_TK of the k largest logits above their expert's threshold."""
    wide_TE = logits_TE.detach().to(internal_dtype(logits_TE.dtype))
    return top_ids(wide_TE - thresholds_E.to(wide_TE.dtype), topk)


def quantile_thresholds(
    logits_TE: Tensor, thresholds_E: Tensor, topk: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(thresholds_E, has_tokens): the thresholds that would have balanced these tokens, in fp64.

    For every token the margin to beat is the (k + 1)-th largest of logits - thresholds. An expert that shall get
    n = floor(tokens * K / E) tokens sets its threshold to the (n + 1)-th largest of logits - margin. Without any valid
    token the thresholds are 0 and `has_tokens` is False.
    """
    wide_TE = logits_TE.detach().to(internal_dtype(logits_TE.dtype))
    excess_TE = wide_TE - thresholds_E.to(wide_TE.dtype)
    margin_T = excess_TE.sort(dim=-1, descending=True).values[:, topk]
    column_TE = wide_TE - margin_T[:, None]
    num_experts = column_TE.shape[1]
    if valid_T is not None:
        column_TE = column_TE.masked_fill(~valid_T[:, None], -torch.inf)
    num_tokens = _num_valid(valid_T, column_TE).to(torch.int64)
    target = (num_tokens * topk // num_experts).expand(1, num_experts)
    found_E = column_TE.sort(dim=0, descending=True).values.gather(0, target).squeeze(0)
    has_tokens = num_tokens > 0
    return torch.where(has_tokens, found_E, 0).double(), has_tokens


def whole_microbatch(logits_TE: Tensor, valid_T: Tensor | None, group: ProcessGroup) -> tuple[Tensor, Tensor | None]:
    """Logits and validity of the tokens of all ranks of `group`, which share a microbatch, without gradient."""
    if group.size == 1:
        return logits_TE, valid_T
    # tp x cp: T * E logits and T bytes per layer and microbatch, for quantile balancing alone
    everyone = AllGather(group)
    whole_TE = run(everyone, logits_TE.detach())
    return whole_TE, None if valid_T is None else run(everyone, valid_T.to(torch.uint8)).bool()


# expert choice (arXiv 2202.09368)


def expert_choice(
    logits_TE: Tensor, config: RouterConfig, capacity: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(map_TE, probs_TE): every expert takes the `capacity` tokens that score highest with it.

    S = softmax(X W) over the experts (or sigmoid and sqrtsoftplus scores normalised to sum to 1 per token); expert e
    takes the top `capacity` of column e, ties to the earliest token, and weighs each with S[t, e] (section 3.2 of the
    paper: G, I = TopK(S^T, k)). A token may meet any number of experts, also none; weights are not normalised again.
    """
    scores_TE = balance_scores(logits_TE, config)
    ranking_TE = scores_TE.detach()
    if valid_T is not None:
        ranking_TE = ranking_TE.masked_fill(~valid_T[:, None], -1)
    taken = ranking_TE.sort(dim=0, descending=True, stable=True).indices[:capacity]
    map_TE = torch.zeros_like(ranking_TE, dtype=torch.bool).scatter_(0, taken, True)
    if valid_T is not None:
        map_TE = map_TE & valid_T[:, None]
    probs_TE = scores_TE * map_TE
    if config.scaling_factor is not None:
        probs_TE = probs_TE * config.scaling_factor
    return map_TE, probs_TE.to(logits_TE.dtype)


def _num_valid(valid_T: Tensor | None, like_TE: Tensor) -> Tensor:
    """Number of tokens that are not padding, as a scalar on the device."""
    if valid_T is None:
        return like_TE.new_full((), len(like_TE))
    return valid_T.sum().to(like_TE.dtype)
