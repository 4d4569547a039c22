"""In what number formats a run computes and stores."""

from dataclasses import dataclass
from typing import Literal

FloatName = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Formats of parameters, gradients and optimizer state."""

    params: FloatName = "fp32"
    """Parameters and activations. Internals (softmax, norms, losses) run in promote(fp32, params)."""
    grads: FloatName = "fp32"
    """Gradient accumulation and reduction."""
    master: FloatName = "fp32"
    """Weights the optimizer keeps. No copy is kept where it equals `params`."""
    deterministic: bool = False
