"""Builds modules of components outside a model."""

from typing import Any

from megatron_moe.config.component import Component
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.components import Site, new_module
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.quantizer_factory import NO_QUANTIZERS, LinearQuantizers


def standalone_resources(ctx: ParallelContext, kernels: Kernels) -> ModelResources:
    """Resources of a module outside a model, without recompute and offload."""
    return ModelResources(ctx, kernels, SavedTensorPolicy())


def module_of(
    config: Component,
    ctx: ParallelContext,
    kernels: Kernels | None = None,
    *,
    layer: int = 0,
    quantizers: LinearQuantizers = NO_QUANTIZERS,
) -> Any:
    """Builds the module of a component with its own resources. `layer`: index under which it reports metrics."""
    resources = standalone_resources(ctx, kernels or reference.bundle())._replace(quantizers=quantizers)
    return new_module(config, Site("layer", layer), resources)
