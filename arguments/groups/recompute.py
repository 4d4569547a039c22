"""What is forgotten in the forward pass and computed again in the backward pass."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """Activation recomputation: saves memory, changes no number."""

    recompute_granularity: Literal["full", "selective"] | None = flag(None)
    """Recompute whole layers, or those modules that `--recompute-modules` names."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """Of `--recompute-granularity full`: all layers in chunks, or the first ones of every virtual stage alone."""
    recompute_num_layers: int | None = flag(None, least=1)
    """Of `--recompute-granularity full`: layers in a chunk, which keeps its input alone (uniform), or recomputed
    layers of a virtual stage (block)."""
    recompute_modules: (
        tuple[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "mhc"], ...]
        | None
    ) = flag(
        None, status="close", note="layernorm covers both norms of every layer; gated delta attention has no modules"
    )
    """Modules that `--recompute-granularity selective` recomputes; core_attn if none is given."""
    distribute_saved_activations: bool = flag(False)
    """Spread the inputs of recomputed layers over tensor-parallel ranks."""
