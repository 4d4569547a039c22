"""Number-format flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import close, flag, not_yet, ours, refused

_FP8 = "applies to --fp8-format, which is not available yet"
_FP4 = "applies to --fp4-format, which is not available yet"
_BLOCKS = "fp16 and fp8 state has one scale per 128 elements"


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Dtypes of parameters, gradients, optimizer state and low-precision GEMMs."""

    bf16: bool = flag(False, essential=True)
    """Parameters and activations in bf16, master weights and gradients in fp32. Default: everything in fp32."""
    fp64: bool = ours(False)
    """Parameters, activations, gradients and optimizer state in fp64, to compare results without rounding effects."""
    fp16: bool = refused(False, "loss scaling is not implemented; use --bf16")
    """Parameters and activations in fp16."""
    deterministic_mode: bool = flag(False)
    """Make runs of the same command bitwise reproducible."""
    accumulate_allreduce_grads_in_fp32: bool = close(
        False, "always on, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16 is given"
    )
    """Accumulate and reduce gradients in fp32."""
    grad_reduce_in_bf16: bool = flag(False)
    """Accumulate and reduce gradients in bf16."""
    fp16_lm_cross_entropy: bool = refused(False, "the loss is always computed in fp32; leave the flag out")
    """Compute the loss in fp16."""

    fp8_format: Literal["e4m3", "hybrid"] | None = not_yet(None, "use --bf16")
    """Compute GEMMs in this FP8 format."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = close("delayed", _FP8)
    """FP8 scaling recipe."""
    fp8_param_gather: bool = close(False, _FP8)
    """Store and all-gather weights in FP8."""
    fp4_format: Literal["e2m1"] | None = not_yet(None, "use --bf16")
    """Compute GEMMs in this FP4 format."""
    fp4_recipe: Literal["nvfp4", "custom"] = close("nvfp4", _FP4)
    """FP4 scaling recipe."""
    fp4_param_gather: bool = close(False, _FP4)
    """Store and all-gather weights in FP4."""

    use_precision_aware_optimizer: bool = close(
        False, "with or without --use-distributed-optimizer; see docs/optimizer-memory.md"
    )
    """Store optimizer state in configurable dtypes, and master weights of bf16 parameters as 16-bit remainders."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32")
    """Dtype of the gradients that the optimizer reads."""
    main_params_dtype: Literal["fp32", "fp16"] = close("fp32", _BLOCKS)
    """Dtype of master weights."""
    store_param_remainders: bool = ours(True)
    """Store only those 16 bits of each fp32 master weight that are missing in the bf16 parameter. Results do not
    change. Has no effect without `--use-precision-aware-optimizer`."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = close("fp32", f"{_BLOCKS}; fp8 uses stochastic rounding")
    """Dtype of Adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = close(
        "fp32", f"{_BLOCKS} and holds the square root; fp8 uses stochastic rounding"
    )
    """Dtype of Adam's second moment."""
    fp8_output_proj: bool = not_yet(False, "the output layer uses the dtype of the parameters")
    """Compute the output layer in FP8."""
    te_precision_config_file: str | None = not_yet(None, "all modules use the same format")
    """File with number formats per module."""
    output_logit_dtype: Literal["bf16", "fp32"] | None = not_yet(
        None, "logits have the dtype of the parameters; the loss is computed in fp32"
    )
    """Dtype of the logits."""
