"""Applies an FP8 or FP4 recipe to the linear layers of a model."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from megatron_moe.config.precision import ActivationModule, LowPrecisionConfig, OperandFormat, PrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.layers.linear import Linear
from megatron_moe.layers.mlp import MLP
from megatron_moe.layers.norm import Norm
from megatron_moe.model.attention import Attention
from megatron_moe.model.gpt import GPT
from megatron_moe.model.mla import MLA
from megatron_moe.model.output_head import Head
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.moe.experts import ExpertStack
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.moe.token_dispatcher.flex import ExchangeFormats, FlexDispatcher
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import held_experts
from megatron_moe.precision.linear_quantizer import DelayedScaling, LinearQuantizer, ModelQuantizers
from megatron_moe.precision.stored_weight import StoredWeight

LowPrecisionModule = Linear | ExpertStack | Head


def apply_low_precision(model: GPT, precision: PrecisionConfig, ctx: ParallelContext, kernels: Kernels) -> None:
    """Sets `precision` of the linear layers and experts of the decoder and of multi-token prediction.

    Embedding, router, gates, norms and the output layer keep the dtype of the parameters; the output layer only without
    `config.output_layer`. So do the first and last decoder layers selected by `config`. Patterns of
    `precision.module_precision` override the recipe of single modules. With `precision.low_precision_params`, the
    weights get a `StoredWeight`, which an optimizer then fills.
    """
    for name, module in model.named_modules():
        config = _config_of(name, module, model, precision) if isinstance(module, LowPrecisionModule) else None
        if isinstance(module, LowPrecisionModule) and config is not None:
            delayed = _delayed_scaling(module, config, ctx) if config.recipe == "delayed" else None
            options = {
                "name": name,
                "save_input": _saves_input(name, model, config),
                "delayed": delayed,
                "device": ctx.device,
            }
            config = config.of_experts if isinstance(module, ExpertStack) else config
            module.quantizer = LinearQuantizer(config, kernels, **options)
            if not precision.low_precision_params or module.weight is None:
                continue
            shape, dtype = tuple(module.weight.shape), module.weight.dtype
            if config.weights.is_stored(shape[-1]):
                scale = None if delayed is None else module.quantizer.weight_scale
                module.weight.stored = StoredWeight(shape, config.weights, dtype, scale)
    for module in model.modules():
        if isinstance(module, MoELayer) and model.saved_tensors.stash is None and module.experts.has_fused_casts:
            # tokens are saved instead of a columnwise copy of rows; on one rank, the router saves them anyway
            fc1 = module.experts.linear_fc1.quantizer
            can_gather = module.dispatcher.token_major is not None
            if can_gather and fc1 is not None and (ctx.group("etp_ep").size == 1 or not fc1.weight_grad):
                module.dispatcher.token_major = True
        if isinstance(module, MoELayer) and isinstance(module.dispatcher, FlexDispatcher):
            module.dispatcher.formats = exchange_formats(module)
        for norm, readers in _readers_of_norms(module) if kernels.fuses_norms else ():
            if isinstance(norm, Norm) and norm.bias is None:
                norm.copy_format = _copy_format(readers)


def exchange_formats(layer: MoELayer) -> ExchangeFormats:
    """FP8 formats in which a layer exchanges tokens: those to which its experts would quantise the same rows."""
    comm, experts = layer.expert_comm, layer.experts
    fc1, fc2 = experts.linear_fc1.quantizer, experts.linear_fc2.quantizer
    tokens = fc1.formats[0] if comm.fp8_tokens and fc1 is not None and fc1.fused_block else None
    grads = fc2.formats[1] if comm.fp8_grads and fc2 is not None and fc2.fused_block else None
    assert tokens is None or not experts.config.probs_on_input, (
        "experts quantise the product of tokens and probabilities"
    )
    assert grads is None or not experts.config.probs_on_output, "experts scale gradients before they quantise them"
    return ExchangeFormats(tokens, grads)


def _readers_of_norms(module: nn.Module) -> Iterator[tuple[nn.Module, list[Linear]]]:
    """Norms of a module, each with the linear layers that read its result soon afterwards."""
    if isinstance(module, MLA):
        if module.config.q_lora_rank is not None:
            yield module.q_layernorm, [module.linear_q_up_proj]
        yield module.kv_layernorm, [module.linear_kv_up_proj]
    if not isinstance(module, TransformerLayer):
        return
    mixer, mlp = module.self_attention, module.mlp
    if isinstance(mixer, MLA):
        of_q = mixer.linear_q_proj if mixer.config.q_lora_rank is None else mixer.linear_q_down_proj
        yield module.input_layernorm, [of_q, mixer.linear_kv_down_proj]
    elif isinstance(mixer, Attention):
        yield module.input_layernorm, [mixer.linear_qkv]
    if isinstance(mlp, MLP):
        yield module.pre_mlp_layernorm, [mlp.linear_fc1]
    elif isinstance(mlp, MoELayer) and not mlp.expert_comm.overlaps_microbatches:
        # other microbatches replace the copy, and may use another stream
        of_shared = None if mlp.shared_experts is None else mlp.shared_experts.linear_fc1
        yield module.pre_mlp_layernorm, [each for each in (mlp.fc1_latent_proj, of_shared) if each is not None]


def _copy_format(readers: list[Linear]) -> OperandFormat | None:
    """Format in which linear layers read a rowwise copy of their input; None if none does, or if a layer saves a
    columnwise copy: one cast that makes both copies has the memory traffic of a norm that makes one and a cast."""
    # with tensor parallelism, shards read a gathered or copied tensor
    whole = [linear for linear in readers if linear.tp_dim is None or linear.ctx.group("tp").size == 1]
    low = [linear.quantizer for linear in whole if linear.quantizer is not None and linear.quantizer.fused_block]
    return low[0].formats[0] if low and all(quantizer.save_input for quantizer in low) else None


def new_model_quantizers(model: GPT, seed: int, ctx: ParallelContext) -> ModelQuantizers:
    """Low-precision state of all modules of `model`."""
    modules = (module for module in model.modules() if isinstance(module, LowPrecisionModule))
    layers = [module.quantizer for module in modules if module.quantizer is not None]
    # tp_dp_cp: all ranks of a pipeline stage
    reduce_max = partial(all_reduce_, group=ctx.group("tp_dp_cp"), op="max")
    return ModelQuantizers(layers, seed, reduce_max)


def weights_in_low_precision(model: GPT) -> dict[nn.Parameter, LinearQuantizer]:
    """State of every weight of the layers that low precision applies to, without the output layer."""
    modules = [module for module in model.modules() if isinstance(module, Linear | ExpertStack)]
    return {module.weight: module.quantizer for module in modules if module.quantizer is not None}


def _delayed_scaling(module: LowPrecisionModule, config: LowPrecisionConfig, ctx: ParallelContext) -> DelayedScaling:
    """Scales of a module, saved in checkpoints as its buffers `fp8_scales` and `fp8_amax_history`."""
    experts = None
    if isinstance(module, ExpertStack):
        experts = module.weight.global_shape[0], held_experts(module.weight).start
    delayed = DelayedScaling(config, ctx.device, *(experts or (None, 0)))
    module.register_buffer("fp8_scales", delayed.scales)
    module.register_buffer("fp8_amax_history", delayed.history)
    return delayed


def _config_of(
    name: str, module: LowPrecisionModule, model: GPT, precision: PrecisionConfig
) -> LowPrecisionConfig | None:
    """Recipe of a module; None: its GEMMs use the dtype of the parameters."""
    config = precision.low_precision
    if config is not None and not _uses_low_precision(name, module, model, config):
        config = None
    for override in precision.module_precision:
        if fnmatchcase(name, override.pattern) and not isinstance(module, Head):
            applies = override.in_params_dtype if config is None else override.in_low_precision
            return override.config if applies else config
    return config


def _uses_low_precision(name: str, module: LowPrecisionModule, model: GPT, config: LowPrecisionConfig) -> bool:
    if isinstance(module, Head):
        return config.output_layer
    parts = name.split(".")
    if parts[0] != "decoder":
        return True
    return config.covers(int(parts[2]), len(model.config.layers))  # decoder.layers.7.mlp.linear_fc1


def _saves_input(name: str, model: GPT, config: LowPrecisionConfig) -> bool:
    """Whether a module saves its original input for backward instead of the columnwise copy: if it is not one of
    `config.activation_modules`, or if the original is saved anyway, or recomputed, or stored in pages."""
    owner, _, linear = name.rpartition(".")
    saved_tensors, module = model.saved_tensors, _activation_module(owner, linear)
    if module is not None and module not in config.activation_modules:
        return True
    if module == "experts":
        is_discarded = linear == "linear_fc2" and saved_tensors.is_recomputed("moe_act")
        return saved_tensors.stash is not None or is_discarded
    if module == "attn_proj":  # attention saves its output, except where a gate multiplies it, or if it is recomputed
        attention = model.get_submodule(owner)
        is_gated = isinstance(attention, Attention) and attention.config.output_gate
        return not is_gated and not saved_tensors.is_recomputed("core_attn")
    # the router saves the same input
    if linear == "fc1_latent_proj" or (module == "shared_experts" and linear == "linear_fc1"):
        return True
    if linear in ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"):
        # two layers of MLA have the same input; without `fused_block`, each would save a separate copy, as would a
        # layer whose input enters tensor parallelism
        mla = model.get_submodule(owner)
        assert isinstance(mla, MLA), f"{owner} has {linear}"
        is_common = mla.config.q_lora_rank is not None or mla.ctx.group("tp").size == 1
        return config.fused_block is None or not is_common or saved_tensors.is_recomputed("layernorm")
    return linear in ("linear_qkv", "linear_fc1") and saved_tensors.is_recomputed("layernorm")


def _activation_module(owner: str, linear: str) -> ActivationModule | None:
    """Module of `--low-precision-activation-modules` to which a linear layer belongs."""
    if linear == "linear_proj":
        return "attn_proj"
    if linear in ("linear_fc1", "linear_fc2"):
        parts = owner.rsplit(".", 1)
        return "experts" if parts[-1] == "experts" else "shared_experts" if parts[-1] == "shared_experts" else "mlp"
    if linear in ("linear_qkv", "linear_q_proj") or linear.endswith(("_down_proj", "_up_proj")):
        return "qkv_linear"
    if linear.endswith("_latent_proj"):
        return "experts"
    return "mtp" if linear == "eh_proj" else None
