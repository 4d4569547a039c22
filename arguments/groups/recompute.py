"""What is forgotten in the forward pass and computed again in the backward pass."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag

_ALL_KEPT = "all activations are kept; smaller microbatches or more ranks need less memory"


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """Activation recomputation: saves memory, changes no number."""

    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, status="not yet", harmless=True, note=_ALL_KEPT
    )
    """Recompute whole layers, or chosen modules."""
    recompute_method: Literal["uniform", "block"] | None = flag(None, status="not yet", harmless=True, note=_ALL_KEPT)
    """Whole layers: in chunks, or the first ones of every stage."""
    recompute_num_layers: int | None = flag(None, status="not yet", harmless=True, note=_ALL_KEPT)
    """Layers in a chunk, or layers of a stage."""
    recompute_modules: tuple[str, ...] | None = flag(None, status="not yet", harmless=True, note=_ALL_KEPT)
    """Chosen modules, such as core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts."""
    distribute_saved_activations: bool = flag(False, status="not yet", harmless=True, note=_ALL_KEPT)
    """Spread saved inputs over tensor-parallel ranks."""
