"""Number formats."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag

_FP8 = "applies to --fp8-format, which is not available yet"
_FP4 = "applies to --fp4-format, which is not available yet"
_BLOCKS = "fp16 and fp8 have a scale for 128 elements"


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Formats of parameters, gradients, optimizer state, and low-precision matrix products."""

    bf16: bool = flag(False, essential=True)
    """Parameters and activations in bf16, master weights and gradients in fp32. Without it all is fp32."""
    fp64: bool = flag(False, status="ours")
    """Everything in double precision, for proofs."""
    fp16: bool = flag(False, status="refused", note="fp16 needs loss scaling, which is not built; use --bf16")
    """Parameters and activations in fp16."""
    deterministic_mode: bool = flag(False)
    """The same command gives the same numbers, bit for bit."""
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, status="close", note="they always are, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16"
    )
    """Accumulate and reduce gradients in fp32."""
    grad_reduce_in_bf16: bool = flag(False)
    """Accumulate and reduce gradients in bf16."""
    fp16_lm_cross_entropy: bool = flag(
        False, status="refused", note="the loss always is computed in fp32; leave it out"
    )
    """Compute the loss in fp16."""

    fp8_format: Literal["e4m3", "hybrid"] | None = flag(None, status="not yet", note="use --bf16")
    """Matrix products in FP8, of this format."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = flag(
        "delayed", status="close", note=_FP8
    )
    """How FP8 tensors are scaled."""
    fp8_param_gather: bool = flag(False, status="close", note=_FP8)
    """Keep and gather weights in FP8."""
    fp4_format: Literal["e2m1"] | None = flag(None, status="not yet", note="use --bf16")
    """Matrix products in FP4."""
    fp4_recipe: Literal["nvfp4", "custom"] = flag("nvfp4", status="close", note=_FP4)
    """How FP4 tensors are scaled."""
    fp4_param_gather: bool = flag(False, status="close", note=_FP4)
    """Keep and gather weights in FP4."""

    use_precision_aware_optimizer: bool = flag(
        False, status="close", note="with or without --use-distributed-optimizer; see docs/optimizer-memory.md"
    )
    """Optimizer state in chosen formats, and master weights of bf16 parameters as 16-bit remainders."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32")
    """Format of gradients in the optimizer."""
    main_params_dtype: Literal["fp32", "fp16"] = flag("fp32", status="close", note=_BLOCKS)
    """Format of master weights."""
    store_param_remainders: bool = flag(True, status="ours")
    """With --use-precision-aware-optimizer, bf16 and fp32 master weights: keep of a master weight only the 16 bits that
    its parameter does not have. Changes no number."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", status="close", note=f"{_BLOCKS}; fp8 rounds at random"
    )
    """Format of Adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", status="close", note=f"{_BLOCKS}, and keep the square root; fp8 rounds at random"
    )
    """Format of Adam's second moment."""
    fp8_output_proj: bool = flag(False, status="not yet", note="the head is computed in the parameters' format")
    """The output head in FP8."""
    te_precision_config_file: str | None = flag(None, status="not yet", note="all modules have one format")
    """File with formats of single modules."""
    output_logit_dtype: Literal["bf16", "fp32"] | None = flag(
        None, status="not yet", note="logits have the parameters' format, and the loss is computed in fp32"
    )
    """Format of the logits."""
