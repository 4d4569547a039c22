"""Precision flags: dtypes, loss scaling, FP8 and FP4 recipes, and determinism."""

from dataclasses import dataclass
from typing import Annotated, Literal

from arguments.flag import differs, flag, new_flag, refused
from arguments.values import FilePath
from megatron_moe.config.registry import QUANTIZATION_RECIPES

_CUSTOM = "use one of the other recipes"
_BLOCKS = "fp16 and fp8 state has one scale per 128 elements"


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Dtypes of parameters, gradients, optimizer state and low-precision GEMMs."""

    bf16: bool = flag(False, essential=True)
    """Parameters and activations in bf16, master weights and gradients in fp32. Without `--bf16`, `--fp16` or `--fp64`,
    everything is fp32."""
    fp64: bool = new_flag(False)
    """Parameters, activations, gradients and optimizer state in fp64, to compare results without rounding effects."""
    fp16: bool = flag(False)
    """Parameters and activations in fp16, master weights and gradients in fp32, with a scaled loss. On GPUs, expert
    GEMMs run in plain torch and synchronise with the host, so `--bf16` is faster."""
    loss_scale: float | None = flag(None, least=1)
    """fp16: constant loss scale. Default: dynamic loss scaling, which halves the scale after overflows and doubles it
    after `--loss-scale-window` consecutive steps without one."""
    initial_loss_scale: float = flag(2.0**32, least=1)
    """fp16: loss scale of the first step, without `--loss-scale`."""
    min_loss_scale: float = flag(1.0, least=1)
    """fp16: lower limit of the dynamic loss scale."""
    loss_scale_window: float = flag(1000.0, least=1)
    """fp16: number of consecutive steps without overflow after which the loss scale is doubled."""
    hysteresis: int = flag(2, least=1)
    """fp16: number of overflows, counted since the loss scale was last doubled, after which it is halved. Each further
    overflow halves it again."""
    deterministic_mode: bool = flag(False)
    """Make runs of the same command bitwise reproducible."""
    accumulate_allreduce_grads_in_fp32: bool = differs(
        False, "always on, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16 is given"
    )
    """Accumulate and reduce gradients in fp32."""
    grad_reduce_in_bf16: bool = flag(False)
    """Accumulate and reduce gradients in bf16."""
    fp16_lm_cross_entropy: bool = refused(False, "the loss is always computed in fp32; leave the flag out")
    """Compute the loss in fp16."""

    fp8_format: Literal["e4m3", "hybrid"] | None = flag(None)
    """Compute the GEMMs of linear layers in FP8: e4m3, or hybrid with output gradients in e5m2. Embedding, router,
    attention, norms and output layer keep the dtype of the parameters."""
    fp8_recipe: Annotated[str, QUANTIZATION_RECIPES] = differs(
        "delayed", "custom is not available; imported files may add recipes instead"
    )
    """FP8 scaling recipe: one scale per tensor from its history (delayed) or its values (tensorwise), or one scale per
    block of 128 (blockwise) or 32 (mxfp8) elements; nvfp4 is for `--fp4-recipe`. Imported files may add recipes (see
    `--import`)."""
    fp8_wgrad: bool = differs(
        True, "Megatron ignores --no-fp8-wgrad with Transformer Engine 2.0 and later", off=("--disable-fp8-wgrad",)
    )
    """Compute weight gradients in FP8 or FP4. Off: compute them in the dtype of the parameters from the unquantised
    inputs."""
    fp8_expert_wgrad: Literal["auto", "always", "never"] = new_flag("auto")
    """Compute weight gradients of routed experts in FP8 or FP4 too. auto: with the blockwise recipe only if it is
    faster for the number of rows and the widths of the experts (docs/low-precision.md)."""
    low_precision_activation_modules: (
        tuple[Literal["qkv_linear", "attn_proj", "mlp", "experts", "shared_experts", "mtp"], ...] | None
    ) = new_flag(None, "inputs that are saved in the dtype of the parameters anyway are not saved twice")
    """Modules whose linear layers save their inputs in FP8 or FP4 for the weight gradient; others save the unquantised
    inputs. qkv_linear: all projections to queries, keys, values and their latents; mtp: projection of multi-token
    prediction. Default: all. Has no effect on results."""
    activation_func_fp8_input_store: bool = new_flag(
        False, "in Megatron-LM a field of the model configuration, which stores FP8 without scales"
    )
    """Save the inputs of the activation functions of MLPs and experts in FP8, with the scales of GEMM inputs. Backward
    computes the activation and its gradient from them, so gradients change. Requires the blockwise or mxfp8 recipe."""
    fp8_margin: int = flag(0, least=0)
    """Divide the scales of delayed scaling by 2 to the power of the margin."""
    fp8_amax_history_len: int = differs(1, "the history has one entry per iteration, not per microbatch", least=1)
    """Number of iterations whose largest magnitudes delayed scaling keeps to compute its scales."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent")
    """Entry of the history from which delayed scaling computes its scales."""
    fp8_param_gather: bool = flag(False)
    """Store and all-gather the weights of FP8 GEMMs in FP8, instead of FP8 copies of weights in bf16."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = differs(
        False, "no effect: ranks gather the bytes of both copies in place, without another buffer"
    )
    """With `--fp8-param-gather` and recipe mxfp8, gather weights in bf16 in the memory of the gradients."""
    fp8_output_proj: bool = flag(False)
    """Compute the output layer in FP8; requires the mxfp8 recipe."""
    first_last_layers_bf16: bool = flag(False)
    """Compute the first and last decoder layers in the dtype of the parameters."""
    num_layers_at_start_in_bf16: int = flag(1, least=0)
    """Number of layers at the start of the decoder to which `--first-last-layers-bf16` applies."""
    num_layers_at_end_in_bf16: int = flag(1, least=0)
    """Number of layers at the end of the decoder to which `--first-last-layers-bf16` applies."""
    fp4_format: Literal["e2m1"] | None = flag(None)
    """Compute the GEMMs of linear layers in FP4."""
    fp4_recipe: Literal["nvfp4", "custom"] = refused("nvfp4", _CUSTOM)
    """FP4 scaling recipe. nvfp4: one E4M3 scale per 16 elements (weights: per 16x16) and one fp32 scale per matrix."""
    fp4_param_gather: bool = flag(False)
    """Store and all-gather the weights of FP4 GEMMs in FP4, instead of FP4 copies of weights in bf16."""
    emulate_low_precision: bool = new_flag(False)
    """Compute FP8 and FP4 GEMMs from dequantised operands. Slow; for numerics on devices without these formats."""

    use_precision_aware_optimizer: bool = differs(
        False, "with or without --use-distributed-optimizer; see docs/optimizer-memory.md"
    )
    """Store optimizer state in configurable dtypes, and master weights of bf16 parameters as 16-bit remainders."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32")
    """Dtype of the gradients that the optimizer reads."""
    main_params_dtype: Literal["fp32", "fp16"] = differs("fp32", _BLOCKS)
    """Dtype of master weights."""
    store_param_remainders: bool = new_flag(True)
    """Store only those 16 bits of each fp32 master weight that are missing in the bf16 parameter. Results do not
    change. Has no effect without `--use-precision-aware-optimizer`."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = differs("fp32", f"{_BLOCKS}; fp8 uses stochastic rounding")
    """Dtype of Adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = differs(
        "fp32", f"{_BLOCKS} and contains the square root; fp8 uses stochastic rounding"
    )
    """Dtype of Adam's second moment."""
    te_precision_config_file: FilePath | None = differs(None, "training and evaluation recipes must be equal")
    """YAML file with FP8 and FP4 recipes of single modules, selected by patterns of their names; see
    docs/low-precision.md."""
    output_logit_dtype: Literal["bf16", "fp32"] | None = differs(
        None, "must be the dtype of the parameters; the loss is computed in fp32"
    )
    """Dtype of the logits. Default: the dtype of the parameters."""
