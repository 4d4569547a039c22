"""Number formats of parameters, gradients, optimizer state and GEMMs."""

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
    """Adam's first moment (`--exp-avg-dtype`); ignored if `main_params_dtype` is fp64: the moment is fp64 too."""
    exp_avg_sq_dtype: StateName = "fp32"
    """Adam's second moment (`--exp-avg-sq-dtype`); ignored if `main_params_dtype` is fp64: the moment is fp64 too."""
    store_param_remainders: bool = False
    """Stores only the low 16 bits of fp32 master weights, as the bf16 parameters are their high 16 bits: 2 bytes
    instead of 4, without loss (`--store-param-remainders`)."""
    low_precision: LowPrecision | None = None
    """Scaling recipe of FP8 or FP4 GEMMs (`--fp8-recipe`, `--fp4-recipe`); None: all GEMMs use `params`."""
    low_precision_params: bool = False
    """Stores and gathers the weights of these GEMMs in FP8 or FP4 (`--fp8-param-gather`, `--fp4-param-gather`)."""
