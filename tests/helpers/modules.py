"""Modules of components outside a model."""

from typing import Any

from megatron_moe.config.component import Component
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.components import Site, new_module
from megatron_moe.layers.resources import ModelResources
from megatron_moe.parallel.context import ParallelContext


def module_of(config: Component, ctx: ParallelContext, kernels: Kernels | None = None, *, layer: int = 0) -> Any:
    """Module of a component with its own resources. `layer`: index under which it reports metrics."""
    return new_module(config, Site("layer", layer), ModelResources.alone(ctx, kernels or reference.bundle()))
