"""Activation-recomputation flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """Activation recomputation. Saves memory without changing results."""

    recompute_granularity: Literal["full", "selective"] | None = flag(None)
    """Recompute whole layers, or the modules of `--recompute-modules`."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """For `--recompute-granularity full`: recompute all layers in chunks (uniform), or the first layers of each virtual
    stage (block)."""
    recompute_num_layers: int | None = flag(None, least=1)
    """For `--recompute-granularity full`: layers per chunk, of which only the input is saved (uniform), or recomputed
    layers per virtual stage (block)."""
    recompute_modules: (
        tuple[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "mhc"], ...]
        | None
    ) = flag(
        None,
        status="close",
        note="layernorm covers both norms of every layer; gated delta attention has no recomputable modules",
    )
    """Modules recomputed by `--recompute-granularity selective`. Not set: core_attn."""
    distribute_saved_activations: bool = flag(False)
    """Shard the saved inputs of recomputed layers over tensor-parallel ranks."""
