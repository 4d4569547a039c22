"""Capacity: how many tokens one expert takes at most, and who has to go (GShard, arXiv 2006.16668).

The limit holds for the tokens of one rank's microbatch, all sequences together. It is computed from the slots of the
microbatch, padding included, because it sizes buffers and so must be known to the host. A dropped choice gets the id
-1 and the weight 0; the weights that stay are not normalised again.
"""

import math
from typing import Literal

import torch
from torch import Tensor


def expert_capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """ceil(factor * T * K / E), and at most T: no token visits the same expert twice."""
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def within_capacity(
    ids_TK: Tensor, probs_TK: Tensor, counts_E: Tensor, capacity: int, policy: Literal["probs", "position"]
) -> Tensor:
    """Which choices stay: bool [T, K].

    Every expert keeps `capacity` choices: those of the highest weight (of equal ones the earliest token), or those of
    the earliest tokens. `counts_E` [E] are the choices per expert; choices of -1 do not stay.
    """
    experts = torch.where(ids_TK < 0, len(counts_E), ids_TK).flatten()
    order = torch.arange(len(experts), device=experts.device)
    if policy == "probs":
        order = probs_TK.detach().flatten().sort(descending=True, stable=True).indices
    # a stable sort by expert keeps the order of merit inside every expert
    order = order[experts[order].sort(stable=True).indices]
    starts_E = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    place = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    stays = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, place < capacity)
    return stays.view_as(ids_TK) & (ids_TK >= 0)
