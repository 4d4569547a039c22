"""Number formats of parameters, gradients, optimizer state and matrix products."""

from dataclasses import dataclass
from typing import Literal

FloatName = Literal["fp64", "fp32", "bf16", "fp16"]
StateName = Literal["fp32", "bf16", "fp16", "fp8"]
LowPrecision = Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4", "custom"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of a run."""

    params: FloatName = "fp32"
    """Parameters and activations. Softmax, norms and losses compute in promote(fp32, params)."""
    grads: FloatName = "fp32"
    """Gradient accumulation and reduction."""
    main_params_dtype: FloatName = "fp32"
    """Master weights of the optimizer; not stored separately if equal to `params` (`--main-params-dtype`)."""
    deterministic_mode: bool = False
    """Selects bitwise reproducible kernels (`--deterministic-mode`)."""
    exp_avg_dtype: StateName = "fp32"
    """Adam's first moment (`--exp-avg-dtype`); fp64 if `main_params_dtype` is."""
    exp_avg_sq_dtype: StateName = "fp32"
    """Adam's second moment (`--exp-avg-sq-dtype`); fp64 if `main_params_dtype` is."""
    store_param_remainders: bool = False
    """Stores only the low 16 bits of fp32 master weights, next to the bf16 parameter that has the high ones: 2 bytes
    instead of 4, without loss (`--store-param-remainders`)."""
    low_precision: LowPrecision | None = None
    """Scaling recipe of FP8 or FP4 matrix products (`--fp8-recipe`, `--fp4-recipe`); None: all use `params`."""
    low_precision_params: bool = False
    """Stores and gathers the weights of these products in FP8 or FP4 (`--fp8-param-gather`, `--fp4-param-gather`)."""
