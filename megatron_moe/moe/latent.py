"""Latent MoE: the routed experts work in a space narrower than the model, so that dispatch carries and experts multiply
less; router and shared experts see the full width."""

from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import Linear


def latent_projections(
    hidden_size: int, latent_size: int, ctx: ParallelContext, kernels: Kernels
) -> tuple[Linear, Linear]:
    """The way in, W [L, H], applied before dispatch, and the way out, W [H, L], applied after combine."""
    way_in = Linear(hidden_size, latent_size, ctx, kernels)
    way_out = Linear(latent_size, hidden_size, ctx, kernels, init="output")
    return way_in, way_out
