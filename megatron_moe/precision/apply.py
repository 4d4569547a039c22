"""Applies an FP8 or FP4 recipe to the linear layers of a model."""

from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.attention import Attention
from megatron_moe.model.gpt import GPT
from megatron_moe.model.output_head import Head
from megatron_moe.moe.experts import ExpertStack
from megatron_moe.parallel.linear import Linear
from megatron_moe.precision.linear_precision import LinearPrecision

LowPrecisionModule = Linear | ExpertStack | Head


def apply_low_precision(model: GPT, config: LowPrecisionConfig, kernels: Kernels) -> None:
    """Sets `precision` of the linear layers and experts of the decoder and of multi-token prediction.

    Embedding, router, gates, norms and the output layer keep the dtype of the parameters; the output layer only without
    `config.output_layer`. So do the first and last decoder layers selected by `config`.
    """
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionModule) and _uses_low_precision(name, module, model, config):
            module.precision = LinearPrecision(config, kernels, save_input=_saves_input(name, model))


def linear_precisions(model: GPT) -> list[LinearPrecision]:
    """The low-precision operands of all modules that have them."""
    modules = (module for module in model.modules() if isinstance(module, LowPrecisionModule))
    return [module.precision for module in modules if module.precision is not None]


def _uses_low_precision(name: str, module: LowPrecisionModule, model: GPT, config: LowPrecisionConfig) -> bool:
    if isinstance(module, Head):
        return config.output_layer
    parts = name.split(".")
    if parts[0] != "decoder":
        return True
    layer = int(parts[2])  # decoder.layers.7.mlp.linear_fc1
    return config.layers_at_start <= layer < len(model.config.layers) - config.layers_at_end


def _saves_input(name: str, model: GPT) -> bool:
    """Whether a module saves its original input for backward instead of the columnwise copy, because the original is
    saved anyway, or recomputed, or stored in pages."""
    owner, _, linear = name.rpartition(".")
    saved_tensors = model.saved_tensors
    if owner.endswith(".experts"):
        is_discarded = linear == "linear_fc2" and saved_tensors.is_recomputed("moe_act")
        return saved_tensors.stash is not None or is_discarded
    if linear == "linear_proj":  # attention saves its output, except where a gate multiplies it
        attention = model.get_submodule(owner)
        has_gate = isinstance(attention, Attention) and attention.config.output_gate
        return not has_gate and not saved_tensors.is_recomputed("core_attn")
    if owner.endswith(".shared_experts") and linear == "linear_fc1":  # the router saves the same input
        return True
    follows_norm = linear in ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_fc1")
    return follows_norm and saved_tensors.is_recomputed("layernorm")
