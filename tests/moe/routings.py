"""Routings from explicit ids, and random values for tensors and modules."""

import torch
from torch import Tensor, nn

from megatron_moe.moe.token_dispatcher.base import Routing


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: nn.Module, seed: int = 7) -> None:
    """Initialises every parameter of the module with random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def sparse(
    ids: list[list[int]], probs: Tensor | None = None, *, num_experts: int, capacity: int | None = None
) -> Routing:
    """Builds a routing from expert ids [T, K], in which -1 is a dropped choice.

    Probabilities [T, K] are 1 / K by default, and always 0 for dropped choices. K is 2 if there are no tokens.
    """
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(len(ids), -1 if ids else 2)
    if probs is None:
        probs = torch.full(ids_TK.shape, 1 / ids_TK.shape[1], dtype=torch.float64)
    return Routing(
        num_experts=num_experts,
        ids_TK=ids_TK,
        probs_TK=torch.where(ids_TK < 0, 0, probs),
        counts_E=torch.tensor([int((ids_TK == e).sum()) for e in range(num_experts)]),
        capacity=capacity,
    )


def dense(
    ids: list[list[int]], probs: Tensor | None = None, *, num_experts: int, capacity: int | None = None
) -> Routing:
    """Builds the routing of `sparse` in dense form, as a map [T, E] over all experts."""
    routing = sparse(ids, probs, num_experts=num_experts, capacity=capacity)
    assert routing.ids_TK is not None and routing.probs_TK is not None
    shape = (len(ids), num_experts)
    map_TE, probs_TE = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    for t, row in enumerate(routing.ids_TK.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                map_TE[t, expert] = True
                probs_TE[t, expert] = routing.probs_TK[t, k]
    return Routing(
        num_experts=num_experts, map_TE=map_TE, probs_TE=probs_TE, counts_E=routing.counts_E, capacity=capacity
    )
