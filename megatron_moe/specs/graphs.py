"""What of a training step is recorded once and replayed (CUDA graphs)."""

from dataclasses import dataclass
from typing import Literal

GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """Parts of layers, or whole steps, or nothing."""

    modules: tuple[GraphModule, ...] = ()
    """Parts of the decoder's layers."""
    whole_step: bool = False
    """Forward and backward of all microbatches of a step, as one recording."""
    warmup_steps: int = 3
    """Steps that are computed before anything is recorded."""
