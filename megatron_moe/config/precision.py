"""In what number formats a run computes and stores."""

from dataclasses import dataclass
from typing import Literal

FloatName = Literal["fp64", "fp32", "bf16", "fp16"]
StateName = Literal["fp32", "bf16", "fp16", "fp8"]
LowPrecision = Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4", "custom"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Formats of parameters, gradients and optimizer state."""

    params: FloatName = "fp32"
    """Parameters and activations. Internals (softmax, norms, losses) run in promote(fp32, params)."""
    grads: FloatName = "fp32"
    """Gradient accumulation and reduction."""
    master: FloatName = "fp32"
    """Weights the optimizer keeps. No copy is kept where it equals `params`."""
    deterministic: bool = False
    exp_avg: StateName = "fp32"
    """Adam's first moment. In a run whose master weights are fp64, so are both moments."""
    exp_avg_sq: StateName = "fp32"
    """Adam's second moment."""
    remainders: bool = False
    """Of fp32 master weights of bf16 parameters only the 16 bits are kept that the parameter does not have: 2 bytes
    instead of 4, and the same numbers."""
    low: LowPrecision | None = None
    """Scaling recipe of matrix products in FP8 or FP4; None: all are in the parameters' format."""
    low_params: bool = False
    """Weights of those products are kept and gathered in the low format."""
