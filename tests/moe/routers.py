"""Routers and microbatch descriptions for tests of `megatron_moe/moe`."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.moe import CapacityConfig, RouterConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.moe.router import Router
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny_models
from tests.helpers.modules import standalone_resources

HIDDEN, EXPERTS = 4, 8


def make_router(
    *,
    seed: int = 1,
    capacity: CapacityConfig | None = None,
    ctx: ParallelContext | None = None,
    layer: int = 3,
    **fields: Any,
) -> Router:
    """Router with 8 experts and random weights; by default top-2 and in fp64."""
    fields = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "topk": 2, **fields}
    resources = standalone_resources(ctx or ParallelContext.single(), reference.bundle())
    router = Router(RouterConfig(**fields), capacity, layer, resources)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return router


def make_hidden(steps: int = 5, batch: int = 2, *, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random hidden states [S, B, H] that require a gradient."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(steps, batch, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_()


def make_mb(hidden_SBH: Tensor, **fields: Any) -> MicrobatchContext:
    steps, batch, _ = hidden_SBH.shape
    return tiny_models.make_mb(batch, steps, **fields)


def sees_logits(**fields: Any) -> Router:
    """Router whose logits equal its input: the weight is the identity, and the hidden size the number of experts."""
    num_experts = fields.get("num_experts", EXPERTS)
    router = make_router(**{**fields, "hidden_size": num_experts})
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router


def logits_as_hidden(logits: list[list[float]], batch: int = 1) -> Tensor:
    """Reshapes logits [T, E] to the input [S, B, E] of a router from `sees_logits`, with t = s * B + b."""
    wide = torch.tensor(logits, dtype=torch.float64)
    return wide.view(-1, batch, wide.shape[1]).requires_grad_()
