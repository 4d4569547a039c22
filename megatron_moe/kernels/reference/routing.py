"""Reference implementation of the routing and row ops, in plain torch. Never synchronises with the device."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.costs import most_rows
from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.ops import BalanceSums, RoutedTokens, RowIndex, internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction

EPSILON = 1e-20
"""Added to the sum by which a token's scores are divided, so that the result is finite if all scores are 0."""


# routing


def router_logits(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    return _ReferenceRouterGemm.apply(hidden_TH, weight_EH, dtype)


class _ReferenceRouterGemm(AutogradFunction):
    """Router GEMM with an explicit backward, so that copies of the inputs in a wider dtype are not saved."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        return hidden_TH.to(dtype) @ weight_EH.to(dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TE,) = grads
        hidden_TH, weight_EH = ctx.saved_tensors
        grad_hidden = grad_TE @ weight_EH.to(grad_TE.dtype)
        grad_weight = grad_TE.T @ hidden_TH.to(grad_TE.dtype)
        return grad_hidden.to(hidden_TH.dtype), grad_weight.to(weight_EH.dtype), None


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    *,
    forced_ids_TK: Tensor | None = None,
    valid_T: Tensor | None = None,
    balance_sets: int = 0,
    z: bool = False,
) -> RoutedTokens:
    """See `Kernels.route`. Sigmoid scores, groups and bias follow DeepSeek-V3, arXiv 2412.19437 section 2.1.2."""
    wide_TE = valid_or_zero(logits_TE.to(internal_dtype(logits_TE.dtype)), valid_T)
    scores_TE = wide_TE if config.selects_on_logits else score(wide_TE, config)
    plain_TE = scores_TE.detach()
    if forced_ids_TK is None:
        ranking_TE = plain_TE if bias_E is None else plain_TE + bias_E.to(plain_TE.dtype)
        ids_TK = top_ids(limit_to_groups(ranking_TE, config), config.topk)
    else:
        ids_TK = forced_ids_TK
    ids_TK = valid_ids(ids_TK, valid_T)
    probs_TK = topk_probs(scores_TE, ids_TK, config)
    if config.scaling_factor is not None:
        probs_TK = probs_TK * config.scaling_factor
    balance = None
    if balance_sets:
        best_TK = valid_ids(top_ids(plain_TE, config.topk), valid_T)
        scores_GE = sums_of_sets(valid_or_zero(balance_scores(wide_TE, config), valid_T), balance_sets)
        balance = BalanceSums(scores_GE, count_in_sets(best_TK, config.num_experts, balance_sets))
    return RoutedTokens(
        ids_TK=ids_TK,
        probs_TK=probs_TK.to(logits_TE.dtype),
        counts_E=count_tokens(ids_TK, config.num_experts),
        balance=balance,
        z_sum=squared_logsumexp(wide_TE, valid_T) if z else None,
    )


def balance_scores(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Scores normalised to a sum of 1 per token, in the internal dtype."""
    scores_TE = score(logits_TE.to(internal_dtype(logits_TE.dtype)), config)
    if not config.scores.over_experts:
        scores_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + EPSILON)
    return scores_TE


def squared_logsumexp(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Sum of logsumexp(logits)^2 over valid tokens, in the internal dtype."""
    squares_T = logits_TE.to(internal_dtype(logits_TE.dtype)).logsumexp(dim=-1).square()
    return valid_or_zero(squares_T, valid_T).sum()


def valid_or_zero(values: Tensor, valid_T: Tensor | None) -> Tensor:
    """Returns `values` [T, ...] with 0 for padding tokens (`valid_T` False)."""
    if valid_T is None:
        return values
    return torch.where(valid_T.view(-1, *[1] * (values.dim() - 1)), values, 0)


def valid_ids(ids_TK: Tensor, valid_T: Tensor | None) -> Tensor:
    """Returns the ids with -1 for padding tokens (`valid_T` False)."""
    return ids_TK if valid_T is None else ids_TK.masked_fill(~valid_T[:, None], -1)


def sums_of_sets(values_TE: Tensor, num_sets: int) -> Tensor:
    """Sums the values over each of G sets of tokens: [T, E] -> [G, E]. Token t belongs to set t % G."""
    num_tokens, num_experts = values_TE.shape
    return values_TE.view(num_tokens // num_sets, num_sets, num_experts).sum(dim=0)


def count_in_sets(ids_TK: Tensor, num_experts: int, num_sets: int) -> Tensor:
    """Number of choices per expert in each of G sets of tokens, int64 [G, E]. Token t belongs to set t % G."""
    set_T = torch.arange(len(ids_TK), device=ids_TK.device) % num_sets
    own_TK = torch.where(ids_TK < 0, -1, ids_TK + set_T[:, None] * num_experts)
    return count_tokens(own_TK, num_sets * num_experts).view(num_sets, num_experts)


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    slots = torch.where(ids_TK < 0, num_experts, ids_TK).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.scatter_add_(0, slots, torch.ones_like(slots))[:num_experts]


def score(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Scores of all experts [T, E]: the configured score function, applied to the logits."""
    return config.scores.bound(config.options)(logits_TE)


def softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(dim=-1)


def sqrtsoftplus(logits_TE: Tensor) -> Tensor:
    softplus_TE = torch.logaddexp(logits_TE, torch.zeros_like(logits_TE))
    # sqrt has an infinite derivative at 0, which times a gradient of 0 is nan
    underflows_TE = softplus_TE == 0
    return softplus_TE.masked_fill(underflows_TE, 1).sqrt().masked_fill(underflows_TE, 0)


def limit_to_groups(ranking_TE: Tensor, config: RouterConfig) -> Tensor:
    """Sets all but the best `group_topk` groups to -inf. A group's score is the sum of its topk // group_topk best
    values."""
    if config.group_topk is None:
        return ranking_TE
    assert config.num_groups is not None and config.group_topk <= config.topk, (
        f"{config.group_topk} groups of {config.num_groups}"
    )
    grouped = ranking_TE.view(len(ranking_TE), config.num_groups, -1)
    worth = grouped.topk(config.topk // config.group_topk, dim=-1).values.sum(dim=-1)
    best = top_ids(worth, config.group_topk)
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)


def top_ids(ranking_TE: Tensor, k: int) -> Tensor:
    """Ids of the k largest values per row, in descending order; the lowest id wins ties."""
    return ranking_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def topk_probs(scores_TE: Tensor, ids_TK: Tensor, config: RouterConfig) -> Tensor:
    """Probability of every choice, not yet multiplied by `scaling_factor`; 0 where the id is -1."""
    none = ids_TK < 0
    chosen_TK = scores_TE.gather(-1, ids_TK.clamp(min=0))
    if config.selects_on_logits:
        # the lowest finite number instead of -inf: a token without any expert must get 0, not nan
        chosen_TK = score(chosen_TK.masked_fill(none, torch.finfo(chosen_TK.dtype).min), config)
        return chosen_TK.masked_fill(none, 0)
    chosen_TK = chosen_TK.masked_fill(none, 0)
    if not config.scores.over_experts and config.topk > 1:
        chosen_TK = chosen_TK / (chosen_TK.sum(dim=-1, keepdim=True) + EPSILON)
    return chosen_TK


# rows


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1, first: int = 0) -> RowIndex:
    local_TK = ids_TK.long() - first
    experts = torch.where((local_TK < 0) | (local_TK >= num_experts), num_experts, local_TK).flatten()
    rows = most_rows(experts.shape[0], num_experts, align)
    index, row = assign_rows(experts, num_experts, ids_TK.shape[1], rows, capacity, align)
    return replace(index, rows_TK=row.view_as(ids_TK))


def sort_rows_dense(map_TE: Tensor, rows: int, capacity: int | None) -> RowIndex:
    num_experts = map_TE.shape[1]
    ids_E = torch.arange(num_experts, device=map_TE.device)
    experts = torch.where(map_TE, ids_E, num_experts).flatten()
    return assign_rows(experts, num_experts, num_experts, rows, capacity)[0]


def assign_rows(
    experts: Tensor, num_experts: int, per_token: int, rows: int, capacity: int | None, align: int = 1
) -> tuple[RowIndex, Tensor]:
    """Assigns rows to choices. `experts` [choices] contains each choice's expert, or `num_experts` if the choice is
    dropped. Choice c belongs to token c // per_token. Returns (index without `rows_TK`, row of each choice or -1)."""
    device = experts.device
    order = experts.sort(stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    counts = count_tokens(experts.masked_fill(experts == num_experts, -1), num_experts)
    starts = counts.cumsum(0) - counts
    none = experts == num_experts
    own = experts.clamp(max=num_experts - 1)
    rank_in_expert = rank - starts[own]
    if capacity is None:
        owned = (counts + align - 1) // align * align
    else:
        none = none | (rank_in_expert >= capacity)
        owned = torch.full_like(counts, -(-capacity // align) * align)
        rows = num_experts * -(-capacity // align) * align
    ends = owned.cumsum(0)
    row = (ends - owned)[own] + rank_in_expert
    row = row.masked_fill(none | (row >= rows), -1)
    # choices without a row are written to an additional row
    choice = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
    choice.scatter_(0, torch.where(row < 0, rows, row), torch.arange(len(row), device=device))
    choice = choice[:rows]
    token = torch.where(choice < 0, -1, choice // per_token)
    offsets = ends.clamp(max=rows).to(torch.int32)
    return RowIndex(token_R=token, choice_R=choice, offsets_E=offsets, rows_TK=None), row


def permute(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    wide = tokens_TH.to(internal_dtype(tokens_TH.dtype))  # widened first, so that backward sums in the internal dtype
    return with_zero_row(wide)[index.token_R].to(tokens_TH.dtype)


def unpermute(rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
    wide = rows_RH.to(internal_dtype(rows_RH.dtype))
    # padding rows are added to one additional token, which is then cut off
    token = torch.where(index.token_R < 0, num_tokens, index.token_R)
    sums = wide.new_zeros(num_tokens + 1, wide.shape[1]).index_add(0, token, wide)
    return sums[:num_tokens].to(rows_RH.dtype)


def gather_probs(probs: Tensor, index: RowIndex) -> Tensor:
    return with_zero_row(probs.flatten()[:, None])[index.choice_R].squeeze(-1)


def with_zero_row(values: Tensor) -> Tensor:
    """Appends a row of zeros, so that index -1 selects zeros."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])
