"""From a `ModelSpec` back to the flags that describe it: what `resolve_model` reads, the other way round.

What flags cannot say is left as they have it; `described` builds the model of the flags again, to find it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arguments import derive
from arguments.flag import REQUIRED
from arguments.flags import Flags, Registry
from arguments.resolve_model import model_spec
from arguments.values import LayerPattern
from megatron_moe.specs.attention import AttentionSpec, CoreAttentionSpec, MLASpec, NormSpec, RopeSpec
from megatron_moe.specs.model import LayerSpec, ModelSpec
from megatron_moe.specs.moe import ActivationSpec, MLPSpec, MoESpec, SharedExpertsSpec

_LONGEST_RHYTHM = 8
"""Patterns of layers that repeat after more layers than this are written out."""


def model_flags(model: ModelSpec) -> dict[str, Any]:
    """The architecture of a model, as values by flag name, without training choices (lengths, losses, formats)."""
    first = model.layers[0]
    moe = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoESpec)), None)
    dense = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MLPSpec)), None)
    blocks = [block for block in (dense, moe.experts if moe else None) if block]
    biased = any(block.bias for block in blocks)
    return {
        "num_layers": len(model.layers),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "hidden_dropout": first.hidden_dropout,
        "apply_residual_connection_post_layernorm": first.residual_from_norm,
        "init_method_std": model.init.std,
        "mtp_num_layers": model.mtp.num_layers if model.mtp else None,
        "add_bias_linear": biased,
        "ffn_hidden_size": dense.ffn_hidden_size if dense else None,
        **_norm(first.norm),
        **_activation(blocks[0].activation),
        **_mixer(model, biased),
        **(_moe(moe, model.layers) if moe else {"num_experts": None}),
    }


def described(model: ModelSpec) -> ModelSpec:
    """The model that the flags of `model` describe."""
    values = model_flags(model)
    return model_spec(_flags(values), values["vocab_size"])


def _flags(values: Mapping[str, Any]) -> Flags:
    """Every flag: these values, defaults, and 1 where a flag that is no part of the model must be given."""
    flags = Registry.declared().flags.values()
    defaults = {flag.name: 1 if flag.default is REQUIRED else flag.default for flag in flags}
    return Flags.of({**defaults, **values})


def _norm(norm: NormSpec) -> dict[str, Any]:
    return {"normalization": norm.kind, "norm_epsilon": norm.eps, "apply_layernorm_1p": norm.zero_centered}


def _activation(activation: ActivationSpec) -> dict[str, Any]:
    kind, gated = activation.kind, activation.gated
    return {
        "swiglu": gated and kind == "silu",
        "quick_geglu": gated and kind == "quick_gelu",
        "geglu": gated and kind == "gelu",
        "squared_relu": not gated and kind == "squared_relu",
        "openai_gelu": not gated and kind == "gelu_tanh",
        "glu_linear_offset": activation.linear_offset,
        "activation_func_clamp_value": activation.clamp,
    }


def _mixer(model: ModelSpec, biased: bool) -> dict[str, Any]:
    mixer = model.layers[0].mixer
    latent = isinstance(mixer, MLASpec)
    kind = "learned_absolute" if model.position_embedding == "learned_absolute" else "none"
    rotations = [layer.mixer.rope for layer in model.layers if layer.mixer.rope]
    return {
        "num_attention_heads": mixer.num_heads,
        "multi_latent_attention": latent,
        "position_embedding_type": kind,
        **_core(mixer.core, [layer.mixer.core.window for layer in model.layers]),
        **(_latent(mixer) if isinstance(mixer, MLASpec) else _grouped(mixer, biased)),
        **(_rotation(rotations[0], mixer) if rotations else {}),
        **({} if latent or not rotations else _unrotated(model.layers)),
    }


def _core(core: CoreAttentionSpec, windows: Sequence[tuple[int, int] | None]) -> dict[str, Any]:
    window = next((window for window in windows if window), None)
    pattern: LayerPattern | None = None
    if window and not all(windows):
        present = tuple(window is not None for window in windows)
        pattern = _rhythm(present, lambda every: derive.windowed_layers(len(windows), window, every))
    return {
        "attention_dropout": core.dropout,
        "softmax_type": "learnable" if core.sinks else "off-by-one" if core.off_by_one else "vanilla",
        "window_size": window,
        "window_attn_skip_freq": pattern,
    }


def _grouped(mixer: AttentionSpec, biased: bool) -> dict[str, Any]:
    grouped = mixer.num_query_groups != mixer.num_heads
    return {
        "group_query_attention": grouped,
        "num_query_groups": mixer.num_query_groups if grouped else 1,
        "kv_channels": mixer.head_dim,
        "qk_layernorm": mixer.qk_norm in ("per_head", "full"),
        "qk_l2_norm": mixer.qk_norm == "l2",
        "qk_layernorm_over": "all-heads" if mixer.qk_norm == "full" else "head",
        "add_qkv_bias": mixer.qkv_bias and not biased,
        "attention_output_gate": mixer.output_gate,
    }


def _latent(mixer: MLASpec) -> dict[str, Any]:
    return {
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank,
        "qk_head_dim": mixer.qk_head_dim,
        "qk_pos_emb_head_dim": mixer.qk_rope_dim,
        "v_head_dim": mixer.v_head_dim,
        "qk_layernorm": mixer.qk_norm,
    }


def _rotation(rope: RopeSpec, mixer: AttentionSpec | MLASpec) -> dict[str, Any]:
    latent, yarn = isinstance(mixer, MLASpec), rope.scaling == "yarn"
    found: dict[str, Any] = {
        "position_embedding_type": "yarn" if yarn and not latent else "rope",
        "rotary_base": rope.base,
        "use_rope_scaling": rope.scaling == "llama3",
    }
    if isinstance(mixer, MLASpec):
        found |= {"rope_type": "yarn" if yarn else "rope"}
    else:
        found |= {"rotary_percent": rope.dim / mixer.head_dim, "rotary_interleaved": rope.interleaved}
    if rope.scaling == "llama3":
        found |= {"rope_scaling_factor": rope.scaling_factor}
    if rope.scaling == "linear":
        found |= {"rotary_seq_len_interpolation_factor": round(rope.scaling_factor)}
    return found | (_yarn(rope, latent) if yarn else {})


def _yarn(rope: RopeSpec, latent: bool) -> dict[str, Any]:
    """Hugging Face's concentration of 0.1 ln(factor) + 1 is Megatron's with an mscale of 1 over one of 0."""
    length = "original_max_position_embeddings" if latent else "yarn_original_max_position_embeddings"
    return {
        "rotary_scaling_factor": rope.scaling_factor,
        length: rope.original_max_positions,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_correction_range_round_to_int": rope.truncate,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _unrotated(layers: Sequence[LayerSpec]) -> dict[str, Any]:
    rotated = tuple(layer.mixer.rope is not None for layer in layers)
    if all(rotated):
        return {"no_rope_freq": None}
    pattern = _rhythm(tuple(not rotates for rotates in rotated), lambda every: _every(len(layers), every))
    return {"no_rope_freq": pattern}


def _every(num_layers: int, every: int) -> tuple[bool, ...]:
    return tuple(not rotates for rotates in derive.rotated_layers(num_layers, every))


def _rhythm(present: tuple[bool, ...], layers_of: Callable[[int], tuple[bool, ...]]) -> LayerPattern:
    """The number whose rule gives the layers, or else the list of them."""
    for every in range(1, _LONGEST_RHYTHM + 1):
        if layers_of(every) == present:
            return every
    return tuple(map(int, present))


def _moe(moe: MoESpec, layers: Sequence[LayerSpec]) -> dict[str, Any]:
    router, experts = moe.router, moe.experts
    present = tuple(layer.is_moe for layer in layers)
    return {
        "num_experts": experts.num_experts,
        "moe_layer_freq": _rhythm(present, lambda every: derive.moe_layers(len(layers), experts.num_experts, every)),
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": router.topk,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.group_topk,
        "moe_router_topk_scaling_factor": router.scaling_factor,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_dtype": router.dtype,
        "moe_latent_size": moe.latent_size,
        "moe_apply_probs_on_input": experts.probs_on_input,
        **_shared(moe.shared),
    }


def _shared(shared: SharedExpertsSpec | None) -> dict[str, Any]:
    if shared is None:
        return {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
    return {
        "moe_shared_expert_intermediate_size": shared.mlp.ffn_hidden_size,
        "moe_shared_expert_gate": shared.gate,
    }
