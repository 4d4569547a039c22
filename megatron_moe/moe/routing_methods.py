"""Sinkhorn routing, quantile balancing, expert choice, and expert capacity.

These methods consider all tokens of a microbatch at once. None of them synchronises host and device.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.kernels.reference.routing import balance_scores, top_ids
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.exchange import AllGather, run_exchange

SINKHORN_TOLERANCE = 1e-4
"""Convergence tolerance: mean absolute change of the expert scales between two iterations. Megatron's value."""
SINKHORN_ITERATIONS = 64
"""Fixed number of iterations, to avoid a host synchronisation. After convergence, the scales no longer change."""
_SINKHORN_EPS = 1e-8


# Sinkhorn (BASE layers, arXiv 2103.16716; Clark et al., arXiv 2202.01169)


def sinkhorn_choice(
    logits_TE: Tensor, topk: int, valid_T: Tensor | None, forced_ids_TK: Tensor | None, *, balance: bool
) -> tuple[Tensor, Tensor]:
    """Returns (ids_TK, probs_TK). Without `forced_ids_TK`, each token selects K experts: by the Sinkhorn-balanced
    matrix if `balance` (in training), otherwise by probability. The probability of an expert is sigmoid(logit) for K =
    1, otherwise the softmax over all experts; the K probabilities are not renormalised."""
    wide_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    weights_TE = wide_TE.sigmoid() if topk == 1 else wide_TE.softmax(dim=-1)
    ids_TK = forced_ids_TK
    if ids_TK is None:
        ids_TK = top_ids(sinkhorn(wide_TE.detach(), valid_T) if balance else weights_TE.detach(), topk)
    probs_TK = weights_TE.gather(-1, ids_TK.clamp(min=0)).masked_fill(ids_TK < 0, 0)
    return ids_TK, probs_TK.to(logits_TE.dtype)


def sinkhorn(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Returns exp(logits) [T, E] with rows and columns scaled such that rows sum to 1 / T and columns to 1 / E.

    T counts valid tokens only. Rows of padding tokens (`valid_T` False) are zero.
    """
    # Subtracting the row maximum keeps exp finite; the row scale cancels this factor.
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


def quantile_thresholds(
    logits_TE: Tensor, thresholds_E: Tensor, topk: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (new thresholds, has_tokens): fp64 thresholds that would have balanced the load of these tokens.

    The margin of token t is the (K + 1)-th largest value of logits[t, e] - thresholds_E[e] over the experts e. With n =
    floor(valid tokens * K / E), the new threshold of expert e is the (n + 1)-th largest value of logits[t, e] -
    margin[t] over the tokens t. Without valid tokens, the new thresholds are 0 and `has_tokens` is False.
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


def gather_microbatch(logits_TE: Tensor, valid_T: Tensor | None, group: ProcessGroup) -> tuple[Tensor, Tensor | None]:
    """All-gathers the logits of a microbatch that is split over `group`, and the mask of valid tokens unless it is
    None. Not differentiable."""
    if group.size == 1:
        return logits_TE, valid_T
    # collective over tp x cp: T * E logits and T bytes per layer and microbatch, only for quantile balancing
    everyone = AllGather(group)
    whole_TE = run_exchange(everyone, logits_TE.detach())
    return whole_TE, None if valid_T is None else run_exchange(everyone, valid_T.to(torch.uint8)).bool()


# expert choice (arXiv 2202.09368)


def expert_choice(
    logits_TE: Tensor, config: RouterConfig, capacity: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (map_TE, probs_TE), the selections and their weights; every expert selects `capacity` tokens.

    The scores S [T, E] of a token are the softmax of its logits, or its sigmoid or sqrtsoftplus scores normalised to
    sum to 1. Expert e selects the `capacity` valid tokens with the highest S[t, e]; the earlier token wins ties. The
    weight is S[t, e], times `config.scaling_factor` if set. Any number of experts may select a token.
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
    """Returns the number of valid tokens as a device scalar in the dtype of `like_TE`."""
    if valid_T is None:
        return like_TE.new_full((), len(like_TE))
    return valid_T.sum().to(like_TE.dtype)


def within_capacity(
    ids_TK: Tensor, probs_TK: Tensor, counts_E: Tensor, capacity: int, policy: Literal["probs", "position"]
) -> Tensor:
    """Mask of the choices that are within their expert's capacity: bool [T, K], False where the id is -1.

    Every expert keeps at most `capacity` choices. Policy "probs" keeps the choices with the highest probabilities, and
    the earlier token wins ties. Policy "position" keeps the earliest tokens. `counts_E`: choices per expert.
    """
    experts = torch.where(ids_TK < 0, len(counts_E), ids_TK).flatten()
    order = torch.arange(len(experts), device=experts.device)
    if policy == "probs":
        order = probs_TK.detach().flatten().sort(descending=True, stable=True).indices
    # a stable sort by expert keeps the priority order within each expert
    order = order[experts[order].sort(stable=True).indices]
    starts_E = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    place = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    stays = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, place < capacity)
    return stays.view_as(ids_TK) & (ids_TK >= 0)
