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
    """Format of parameters and activations. Softmax, norms and losses use fp64 if `params` is fp64, else fp32."""
    grads: FloatName = "fp32"
    """Format in which gradients are accumulated and reduced."""
    main_params_dtype: FloatName = "fp32"
    """Format of master weights (`--main-params-dtype`). If equal to `params`, no separate master weights are stored."""
    deterministic_mode: bool = False
    """Selects bitwise reproducible kernels (`--deterministic-mode`)."""
    exp_avg_dtype: StateName = "fp32"
    """Format of Adam's first moment (`--exp-avg-dtype`). If `main_params_dtype` is fp64, the moment is always fp64."""
    exp_avg_sq_dtype: StateName = "fp32"
    """Format of Adam's second moment (`--exp-avg-sq-dtype`). If `main_params_dtype` is fp64, it is always fp64."""
    store_param_remainders: bool = False
    """Stores only the low 16 bits of fp32 master weights; the bf16 parameters are the high 16 bits. This is lossless
    (`--store-param-remainders`)."""
    low_precision: LowPrecision | None = None
    """Scaling recipe of FP8 or FP4 GEMMs (`--fp8-recipe`, `--fp4-recipe`); None: GEMMs use the format `params`."""
    low_precision_params: bool = False
    """Stores and gathers weights in their GEMM's FP8 or FP4 format (`--fp8-param-gather`, `--fp4-param-gather`)."""
