"""Converts a Hugging Face config.json to a ModelConfig. Each model family has its own function for the layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from megatron_moe.checkpoint.huggingface.config_deepseek_v4 import read_deepseek_v4
from megatron_moe.checkpoint.huggingface.config_reader import (
    DEFAULTS,
    HFConfig,
    indexer_types,
    language_model,
    read_indexer,
    read_layers,
    read_mlp,
    read_moe,
    read_norm,
    read_rope,
    with_leading_dense,
)
from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig, yarn_mscale
from megatron_moe.config.component import FeedForwardConfig, MixerConfig, NoFeedForward, NoMixer
from megatron_moe.config.dsa import DSAConfig, indexer_schedule
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import MoEConfig, SharedExpertsConfig

_MAX_LAYERS = 10_000
"""Maximum of num_hidden_layers. A larger value indicates a damaged file; its layer configs could exhaust memory."""
_NUM_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of MTP layers, as named by DeepSeek, transformers and Qwen3.5."""
_NEVER_TIED = frozenset({"kimi_linear", "nemotron_h"})
"""Families whose classes in transformers ignore tie_word_embeddings: the output head has its own weight."""
_LATENT_NORM_EPS = 1e-6
"""Epsilon that transformers uses for the q and kv latent norms, for which it ignores rms_norm_eps."""
_INDEXER_NORM_EPS = 1e-6
"""Epsilon of the LayerNorm of the indexer's keys in DeepSeek-V3.2 and GLM-5; config.json has no key for it."""


def model_config_from_hf(values: Mapping[str, Any], *, mtp: bool = False) -> ModelConfig:
    """Builds the ModelConfig of a config.json. Training options (balancing, dispatcher) have their default values.

    Args:
        mtp: include the MTP layers, whose weights many published folders omit.
    Raises:
        CheckpointProblem: unknown model type, unsupported options, or invalid values.
    """
    hf_config = HFConfig(language_model(values))
    try:
        return _model_config(hf_config, mtp)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # e.g. a string for a list
        raise CheckpointProblem(f"config.json holds an invalid value: {error}; download the file again.") from error


def _model_config(hf_config: HFConfig, mtp: bool) -> ModelConfig:
    hf_config.refuse_if(hf_config.model_type in _MISSING, _MISSING.get(hf_config.model_type, ""))
    read_family = FAMILIES.get(hf_config.model_type)
    if read_family is None:
        known = ", ".join(FAMILIES)
        raise CheckpointProblem(
            f"config.json has model type {hf_config.model_type}, which is not supported. "
            f"Supported model types: {known}."
        )
    num_layers = hf_config.get("num_hidden_layers", 0) or len(hf_config.get("layers_block_type", ()))
    hf_config.refuse_if(num_layers > _MAX_LAYERS, f"has num_hidden_layers = {num_layers}")
    hf_config = HFConfig({**DEFAULTS.get(hf_config.model_type, {}), **hf_config.values})
    layers = read_family(hf_config)
    layers, depth = layers[: num_layers or len(layers)], layers[num_layers or len(layers) :]
    counts = (hf_config.get(key, None) for key in _NUM_MTP_LAYERS)
    num_mtp = int(next((count for count in counts if count is not None), 0)) if mtp else 0
    std = float(hf_config.get("initializer_range", 0.02))
    return ModelConfig(
        hidden_size=hf_config.integer("hidden_size"),
        vocab_size=hf_config.integer("vocab_size"),
        layers=layers,
        norm=layers[0].norm,
        position_embedding="rope" if any(layer.mixer.rotary_tables for layer in layers) else "none",
        max_positions=hf_config.get("max_position_embeddings", hf_config.get("model_max_length", 4096)),
        tied_embeddings=hf_config.get("tie_word_embeddings", False) and hf_config.model_type not in _NEVER_TIED,
        mtp=MTPConfig(num_layers=num_mtp, layer=depth[0] if depth else None) if num_mtp else None,
        init=InitConfig(std=std, output_std=std / sum(len(layer.sublayers) for layer in layers) ** 0.5),
    )


def with_latent_norms_of(config: ModelConfig, published: ModelConfig) -> ModelConfig:
    """Returns a copy of `published` whose q and kv latent norms use rms_norm_eps in the layers where `config` does so.

    A config.json has no epsilon for these norms: transformers uses 1e-6; Megatron-LM, vLLM and SGLang use rms_norm_eps.
    Callers compare `config` with this copy, so that `config` may use either epsilon.
    """
    layers = tuple(
        replace(layer, mixer=layer.mixer.with_unpublished_settings(own.mixer, layer.norm))
        for own, layer in zip(config.layers, published.layers, strict=False)
    )
    return replace(published, layers=(*layers, *published.layers[len(layers) :]))


def mixtral(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Mixtral (arXiv 2401.04088): the router applies softmax to the top-k logits."""
    norm = read_norm(config, 1e-5)
    mixer = _attention(config, norm, default_base=1e6, window=config.get("sliding_window", None))
    num_experts, ffn_hidden_size = config.integer("num_local_experts"), config.integer("intermediate_size")
    return _qwen_layers(config, norm, mixer, read_moe(config, num_experts, ffn_hidden_size, pre_softmax=False))


def qwen2_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Qwen2-MoE: biases on q, k and v, and a gated shared expert."""
    config.refuse_if(config.get("use_sliding_window", False), "has sliding windows in some layers (use_sliding_window)")
    norm = read_norm(config, 1e-6)
    mixer = _attention(config, norm, qkv_bias=config.get("qkv_bias", True))
    shared = SharedExpertsConfig(mlp=read_mlp(config, config.integer("shared_expert_intermediate_size")), gate=True)
    moe = _softmax_moe(config, "num_experts", "moe_intermediate_size", shared)
    return _qwen_layers(config, norm, mixer, moe)


def qwen3_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Qwen3-MoE (arXiv 2505.09388): q and k are normalised per head; no shared expert."""
    norm, bias = read_norm(config, 1e-6), config.get("attention_bias", False)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    mixer = _attention(config, norm, qk_norm="per_head", qkv_bias=bias, out_bias=bias, window=window)
    return _qwen_layers(config, norm, mixer, _softmax_moe(config, _experts_key(config), "moe_intermediate_size"))


def olmoe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of OLMoE (arXiv 2409.02060): q and k are normalised over all heads."""
    config.refuse_if(config.get("clip_qkv", None) is not None, "clips q, k and v (clip_qkv)")
    norm, bias = read_norm(config, 1e-5), config.get("attention_bias", False)
    mixer = _attention(config, norm, qk_norm="full", qkv_bias=bias, out_bias=bias)
    return _qwen_layers(config, norm, mixer, _softmax_moe(config, "num_experts", "intermediate_size"))


def qwen3_next(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Qwen3-Next and Qwen3.5-MoE: gated delta nets, and in some layers attention with an output gate; norms
    with a weight of 1 + w; experts as in Qwen3-MoE and a gated shared expert. A layer of multi-token prediction, which
    always has attention, follows if it differs from the last one."""
    norm, bias = replace(read_norm(config, 1e-6), zero_centered=True), config.get("attention_bias", False)
    attention = _attention(
        config, norm, qk_norm="per_head", qkv_bias=bias, out_bias=bias, output_gate=True, rotary_factor=0.25
    )
    delta_net = GatedDeltaNetConfig(
        hidden_size=config.integer("hidden_size"),
        num_key_heads=config.get("linear_num_key_heads", 16),
        num_value_heads=config.get("linear_num_value_heads", 32),
        key_head_dim=config.get("linear_key_head_dim", 128),
        value_head_dim=config.get("linear_value_head_dim", 128),
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm=read_norm(config, 1e-6),
    )
    shared = SharedExpertsConfig(mlp=read_mlp(config, config.integer("shared_expert_intermediate_size")), gate=True)
    num_experts, width = config.integer(_experts_key(config)), config.integer("moe_intermediate_size")
    # Qwen3.5 has no key norm_topk_prob: it always renormalises
    moe = read_moe(config, num_experts, width, shared=shared, pre_softmax=not config.get("norm_topk_prob", True))
    layers = _qwen_layers(config, norm, attention, moe)
    every = config.get("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(len(layers))]
    mixers = {"linear_attention": delta_net, "full_attention": attention}
    kinds = _layer_kinds(config, "layer_types", tuple(mixers), default)
    own = (replace(layers[-1], mixer=attention),) if kinds[-1] != "full_attention" else ()
    return *(replace(layer, mixer=mixers[kind]) for layer, kind in zip(layers, kinds, strict=True)), *own


def nemotron_h(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Nemotron-H and Nemotron-3: one module each, Mamba-2, attention without positions, MLP or experts, with
    squared ReLU. transformers bounds time steps by time_step_min; Megatron and this program follow the papers."""
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "residual_in_fp32"):
        config.refuse_if(bool(config.get(key, False)), f"has {key}")
    config.refuse_if(not config.get("use_conv_bias", True), "has no biases in its convolutions (use_conv_bias)")
    config.refuse_other("mlp_hidden_act", "relu2")
    config.refuse_other("mamba_hidden_act", "silu")
    hidden = config.integer("hidden_size")
    norm = NormConfig(kind="RMSNorm", eps=float(config.get("layer_norm_epsilon", 1e-5)))
    squared_relu = ActivationConfig(kind="squared_relu")

    def mlp(width: int) -> MLPConfig:
        return MLPConfig(hidden_size=hidden, ffn_hidden_size=width, activation=squared_relu)

    def experts() -> MoEConfig:
        shared = mlp(config.integer("moe_shared_expert_intermediate_size"))
        moe = _sigmoid_moe(config, activation=squared_relu, shared=SharedExpertsConfig(mlp=shared))
        latent = config.get("moe_latent_size", None)
        return replace(moe, latent_size=latent, experts=replace(moe.experts, hidden_size=latent or hidden))

    mamba = MambaConfig(
        hidden_size=hidden,
        num_key_heads=config.integer("n_groups"),
        num_value_heads=config.integer("mamba_num_heads"),
        key_head_dim=config.integer("ssm_state_size"),
        value_head_dim=config.integer("mamba_head_dim"),
        conv_width=config.get("conv_kernel", 4),
        norm=norm,
    )
    attention = replace(_attention(config, norm), rope=None)
    no_mixer, none = NoMixer(hidden_size=hidden), NoFeedForward()
    modules: dict[str, Callable[[], tuple[MixerConfig, FeedForwardConfig]]] = {
        "linear_attention": lambda: (mamba, none),
        "full_attention": lambda: (attention, none),
        "mlp": lambda: (no_mixer, mlp(config.integer("intermediate_size"))),
        "moe": lambda: (no_mixer, experts()),
    }
    letters = dict(zip("M*-E", modules, strict=True))
    default = [letters.get(letter, letter) for letter in config.get("hybrid_override_pattern", "")]
    kinds = _layer_kinds(config, "layers_block_type", tuple(modules), default)
    built = {kind: modules[kind]() for kind in dict.fromkeys(kinds)}
    layers = tuple(LayerConfig(mixer=built[kind][0], feed_forward=built[kind][1], norm=norm) for kind in kinds)
    if not config.get("num_nextn_predict_layers", 0):
        return layers
    default = [letters.get(letter, letter) for letter in config.get("mtp_hybrid_override_pattern", "*E")]
    kinds = _kinds(config, "mtp_layers_block_type", tuple(modules), default)
    depth = [modules[kind]() for kind in kinds]
    mixers, feed_forwards = ([each for each in of_depth if each.present] for of_depth in zip(*depth, strict=True))
    config.refuse_if(
        len(mixers) > 1 or len(feed_forwards) > 1 or not depth[0][0].present and bool(mixers),
        f"has depths of multi-token prediction with the layers {', '.join(kinds)}; known are a mixer, an MLP, or both",
    )
    return *layers, LayerConfig(mixer=(*mixers, no_mixer)[0], feed_forward=(*feed_forwards, none)[0], norm=norm)


_OLD_KINDS = MappingProxyType({"mamba": "linear_attention", "attention": "full_attention"})


def _layer_kinds(config: HFConfig, key: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Kind of every layer of the decoder, from the list `key`. Raises CheckpointProblem if one is not `known` or the
    list does not have `num_hidden_layers` entries."""
    kinds = _kinds(config, key, known, default)
    num_layers = config.get("num_hidden_layers", len(kinds))
    config.refuse_if(len(kinds) != num_layers, f"has {num_layers} layers and {len(kinds)} {key}")
    return kinds


def _kinds(config: HFConfig, key: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Kind of every layer, from the list `key`. Raises CheckpointProblem if one is not `known`."""
    kinds = [_OLD_KINDS.get(kind, kind) for kind in config.get(key, default)]
    unknown = sorted({str(kind) for kind in kinds} - set(known))
    config.refuse_if(bool(unknown), f"has layers of the types {', '.join(unknown)} ({key})")
    config.refuse_if(not kinds, f"has no layers ({key})")
    return kinds


def gpt_oss(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of GPT-OSS (arXiv 2508.10925): attention sinks, alternating windows, biases everywhere, clamped GeGLU."""
    alpha, clamp = config.get("swiglu_alpha", 1.702), float(config.get("swiglu_limit", 7.0))
    config.refuse_if(alpha != 1.702, f"has a sigmoid gain of {alpha} in its activation")
    norm, bias = read_norm(config, 1e-5), config.get("attention_bias", True)
    full, windowed = (
        _attention(config, norm, 150000.0, qkv_bias=bias, out_bias=bias, sinks=True, window=window)
        for window in (None, config.get("sliding_window", 128))
    )
    moe = read_moe(
        config,
        config.integer(_experts_key(config)),
        config.integer("intermediate_size"),
        activation=ActivationConfig(kind="quick_gelu", gated=True, clamp=clamp, linear_offset=1.0),
        bias=True,
        linear_bias=True,
    )
    mixers = {"sliding_attention": windowed, "full_attention": full}
    num_layers = config.integer("num_hidden_layers")
    kinds = _layer_kinds(config, "layer_types", tuple(mixers), ([*mixers] * num_layers)[:num_layers])
    return tuple(LayerConfig(mixer=mixers[kind], feed_forward=moe, norm=norm) for kind in kinds)


def glm4_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of GLM-4.5 (arXiv 2508.06471): RoPE on half of each head, DeepSeek-V3's MoE layer, first layers dense."""
    norm = read_norm(config, 1e-5)
    qk_norm: Literal["per_head", "none"] = "per_head" if config.get("use_qk_norm", False) else "none"
    bias, num_dense = config.get("attention_bias", False), config.integer("first_k_dense_replace")
    mixer = _attention(config, norm, qk_norm=qk_norm, qkv_bias=bias, rotary_factor=0.5)
    return read_layers(config, norm, mixer, _sigmoid_moe(config), lambda i: i < num_dense)


def dots1(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of dots.llm1 (arXiv 2506.05767): q and k are normalised per head, DeepSeek-V3's MoE layer, first layers
    dense, windows in some layers."""
    norm, bias = read_norm(config, 1e-6), config.get("attention_bias", False)
    num_dense = config.get("first_k_dense_replace", 0)
    full, windowed = (
        _attention(config, norm, qk_norm="per_head", qkv_bias=bias, out_bias=bias, window=window)
        for window in (None, config.get("sliding_window", None))
    )
    moe = _sigmoid_moe(config)
    layers = read_layers(config, norm, full, moe, lambda i: i < num_dense)
    mixers = {"sliding_attention": windowed, "full_attention": full}
    first = config.get("max_window_layers", 62) if windowed.core.window else len(layers)
    default = ["full_attention" if index < first else "sliding_attention" for index in range(len(layers))]
    kinds = _layer_kinds(config, "layer_types", tuple(mixers), default)
    return tuple(replace(layer, mixer=mixers[kind]) for layer, kind in zip(layers, kinds, strict=True))


def ernie4_5_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of ERNIE 4.5: interleaved RoPE, softmax scores with an expert bias, shared experts, some layers dense."""
    config.refuse_if(config.get("use_bias", False), "has biases in its linear layers (use_bias)")
    config = HFConfig({**config.values, "num_experts_per_tok": config.require("moe_k")})
    config.refuse_if(config.integer("num_experts_per_tok") == 1, "renormalises the score of a single expert")
    norm = read_norm(config, 1e-5)
    mixer = _attention(config, norm, 500000.0)
    assert mixer.rope is not None, "_attention reads one"
    mixer = replace(mixer, rope=replace(mixer.rope, interleaved=True))
    width, num_shared = config.integer("moe_intermediate_size"), config.get("moe_num_shared_experts", 2)
    moe = read_moe(
        config,
        config.integer("moe_num_experts"),
        width,
        shared=SharedExpertsConfig(mlp=read_mlp(config, num_shared * width)) if num_shared else None,
        score_function="renormalized_softmax",
        expert_bias=True,
        dtype="fp32",
    )
    first, step = (config.get(f"moe_layer_{key}", 1) for key in ("start_index", "interval"))
    last = config.get("moe_layer_end_index", -1)
    last = config.integer("num_hidden_layers") - 1 if last == -1 else last
    return read_layers(config, norm, mixer, moe, lambda i: (i + 1) % step != 0 or not first <= i <= last)


def glm4_moe_lite(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of GLM-4.7-Flash: multi-latent attention and experts of DeepSeek-V3, some layers dense."""
    dense = {"dense": True, "sparse": False}
    default = ["dense", *["sparse"] * (config.integer("num_hidden_layers") - 1)]
    kinds = _layer_kinds(config, "mlp_layer_types", tuple(dense), default)
    mixer = _mla(config, interleaved=config.get("rope_interleave", True))
    return read_layers(config, read_norm(config, 1e-5), mixer, _sigmoid_moe(config), lambda i: dense[kinds[i]])


def minimax_m2(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of MiniMax-M2: q and k are normalised over all heads, RoPE on part of each head, sigmoid scores with an
    expert bias, no shared expert. Layers of multi-token prediction, which transformers does not load, are omitted."""
    config.refuse_if(config.integer("num_experts_per_tok") == 1, "renormalises the score of a single expert")
    norm, rotated = read_norm(config, 1e-6), config.get("rotary_dim", None)
    # published files contain the number of rotated dims, files written by transformers their fraction
    factor = rotated / config.integer("head_dim") if rotated else 1.0
    mixer = _attention(config, norm, 5e6, qk_norm="full", rotary_factor=factor)
    num_experts, width = config.integer(_experts_key(config)), config.integer("intermediate_size")
    moe = read_moe(config, num_experts, width, score_function="sigmoid", expert_bias=True)
    return read_layers(config, norm, mixer, moe, lambda _: False)


def deepseek_v2(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of DeepSeek-V2 (arXiv 2405.04434): softmax over all experts; top-k scores are scaled, not renormalised."""
    config.refuse_if(config.get("norm_topk_prob", False), "renormalises softmax probabilities (norm_topk_prob)")
    config.refuse_other("scoring_func", "softmax")
    config.refuse_other("topk_method", "greedy", "group_limited_greedy")
    topk, group_topk = config.integer("num_experts_per_tok"), config.get("topk_group", 1)
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy" and config.get("n_group", 1) > 1
    config.refuse_if(
        grouped and topk // group_topk != 1, f"scores groups by their best expert at top-{topk} in {group_topk} groups"
    )
    return _deepseek_layers(config, _deepseek_moe(config, grouped, pre_softmax=True), interleaved=True)


def deepseek_v3(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of DeepSeek-V3 (arXiv 2412.19437): multi-latent attention, sigmoid routing with expert bias."""
    config.refuse_other("scoring_func", "sigmoid")
    config.refuse_other("topk_method", "noaux_tc")
    return _deepseek_layers(config, _sigmoid_moe(config), interleaved=config.get("rope_interleave", True))


def deepseek_v32(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of DeepSeek-V3.2 (arXiv 2512.02556): those of DeepSeek-V3 with an indexer in their attention."""
    return _with_indexers(config, interleaved=False)


def glm_moe_dsa(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of GLM-5 (arXiv 2602.15763): as DeepSeek-V3.2, but the indexer rotates adjacent channels, and some layers
    use the keys that an earlier one selects."""
    layers = _with_indexers(config, interleaved=True)
    shared = [kind in ("shared", "S") for kind in indexer_types(config, len(layers))]
    schedule = indexer_schedule(shared)
    what = "has indexers in layers that --dsa-indexer-topk-freq does not describe (indexer_types)"
    config.refuse_if(schedule is None, what)
    freq, offset = schedule or (1, 0)
    found = []
    for layer, reuses_topk in zip(layers, shared, strict=True):
        assert isinstance(layer.mixer, DSAConfig)
        indexer = replace(layer.mixer.indexer, topk_freq=freq, skip_topk_offset=offset)
        found.append(replace(layer, mixer=replace(layer.mixer, indexer=indexer, reuses_topk=reuses_topk)))
    return tuple(found)


def _with_indexers(config: HFConfig, interleaved: bool) -> tuple[LayerConfig, ...]:
    """Layers of DeepSeek-V3 with indexers. `interleaved`: whether the indexers rotate pairs of adjacent channels."""
    config = with_leading_dense(config)
    config.require("q_lora_rank")
    layers, mixer = deepseek_v3(config), _mla(config, interleaved=True)
    assert mixer.rope is not None, "_mla reads one"
    rope, norm = replace(mixer.rope, interleaved=interleaved), NormConfig(kind="LayerNorm", eps=_INDEXER_NORM_EPS)
    indexer = read_indexer(config, rope, norm)
    return tuple(replace(layer, mixer=DSAConfig.of(mixer, indexer)) for layer in layers)


_KIMI_LINEAR_KEYS = MappingProxyType(
    {
        "num_experts_per_tok": "num_experts_per_token",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    }
)
"""Key of DeepSeek-V3 -> key of Kimi-Linear."""


def kimi_linear(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Layers of Kimi-Linear (arXiv 2510.26692): Kimi delta attention, and in some layers multi-latent attention without
    positions; experts as in DeepSeek-V3. Published files list the layers of each kind, counted from 1."""
    config.refuse_other("moe_router_activation_func", "sigmoid")
    config.refuse_if(not config.get("mla_use_nope", True), "rotates q and k (mla_use_nope)")
    named = {own: config.values[key] for own, key in _KIMI_LINEAR_KEYS.items() if key in config.values}
    config = with_leading_dense(HFConfig({**config.values, **named}))
    listed = config.get("linear_attn_config", {})
    num_heads, width = (
        listed.get(key, config.get(f"linear_{key}", default)) for key, default in (("num_heads", 32), ("head_dim", 128))
    )
    delta_attention = KimiDeltaAttentionConfig(
        hidden_size=config.integer("hidden_size"),
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_width=listed.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        norm=read_norm(config, 1e-5),
    )
    latent = replace(_mla(config, interleaved=True), rope=None)
    mixers = {"linear_attention": delta_attention, "full_attention": latent}
    full = listed.get("full_attn_layers", ())
    layers = _deepseek_layers(config, _sigmoid_moe(config), interleaved=True)
    default = ["full_attention" if number in full else "linear_attention" for number in range(1, len(layers) + 1)]
    kinds = _layer_kinds(config, "layer_types", tuple(mixers), default)
    return tuple(replace(layer, mixer=mixers[kind]) for layer, kind in zip(layers, kinds, strict=True))


def _sigmoid_moe(config: HFConfig, **options: Any) -> MoEConfig:
    """Reads the MoE layer of DeepSeek-V3: sigmoid scores, expert bias, expert groups, shared experts.

    This program renormalises scores if and only if top-k > 1. Its score of a group is the sum of the topk // group_topk
    best expert scores; the transformers library always sums two. Options for which the results differ are rejected.
    """
    topk, renormalised = config.integer("num_experts_per_tok"), config.get("norm_topk_prob", True)
    config.refuse_if(topk == 1 and renormalised, "renormalises the score of a single expert (norm_topk_prob)")
    config.refuse_if(topk > 1 and not renormalised, "does not renormalise sigmoid scores (norm_topk_prob false)")
    num_groups, group_topk = config.get("n_group", 1), config.get("topk_group", 1)
    config.refuse_if(
        num_groups > 1 and topk // group_topk != 2,
        f"scores groups by their best 2 experts at top-{topk} in {group_topk} groups",
    )
    return _deepseek_moe(config, num_groups > 1, score_function="sigmoid", expert_bias=True, **options)


FAMILIES: Mapping[str, Callable[[HFConfig], tuple[LayerConfig, ...]]] = MappingProxyType(
    {
        "mixtral": mixtral,
        "qwen2_moe": qwen2_moe,
        "qwen3_moe": qwen3_moe,
        "qwen3_next": qwen3_next,
        "qwen3_5_moe_text": qwen3_next,
        "nemotron_h": nemotron_h,
        "olmoe": olmoe,
        "gpt_oss": gpt_oss,
        "glm4_moe": glm4_moe,
        "glm4_moe_lite": glm4_moe_lite,
        "dots1": dots1,
        "ernie4_5_moe": ernie4_5_moe,
        "minimax_m2": minimax_m2,
        "deepseek_v2": deepseek_v2,
        "deepseek_v3": deepseek_v3,
        "kimi_k2": deepseek_v3,
        "kimi_linear": kimi_linear,
        "deepseek_v32": deepseek_v32,
        "glm_moe_dsa": glm_moe_dsa,
        "deepseek_v4": read_deepseek_v4,
    }
)
"""`model_type` -> function that builds the layers, followed by the MTP layer if it differs from the last one. A new
family also needs name rules in `weight_map` and a case in the logit parity test."""
_MISSING: Mapping[str, str] = MappingProxyType(
    {
        "phimoe": "mixes two experts by thresholds around their scores (sparsemixer), with a bias of the output layer",
        "granitemoe": "multiplies embeddings, residual branches and logits by constants",
        "hunyuan_v1_moe": "normalises q and k after their rotation",
        "minimax": "has attention with a constant decay, and scaled residuals of norms",
    }
)
"""Unsupported features of the families without an entry in `FAMILIES`, by `model_type`, for error messages."""


def _attention(
    config: HFConfig,
    norm: NormConfig,
    default_base: float = 10000.0,
    *,
    window: int | None = None,
    sinks: bool = False,
    rotary_factor: float = 1.0,
    **options: Any,
) -> AttentionConfig:
    """Builds the attention config; `options` are further fields of AttentionConfig.

    Args:
        window: sliding window size in tokens, including the query token (not included in `CoreAttentionConfig.window`).
        rotary_factor: fraction of each head that is rotated if config.json has no `partial_rotary_factor`.
    """
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.get("head_dim", hidden // num_heads)
    core = CoreAttentionConfig(
        softmax_scale=head_dim**-0.5,
        window=(window - 1, 0) if window else None,
        sinks=sinks,
        dropout=float(config.get("attention_dropout", 0.0)),
    )
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_query_groups=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        core=core,
        rope=read_rope(config, head_dim, default_base, default_rotary_factor=rotary_factor),
        norm=norm,
        **options,
    )


def _experts_key(config: HFConfig) -> str:
    """Key in config.json that holds the number of experts; it depends on the version of transformers."""
    return "num_experts" if "num_experts" in config.values else "num_local_experts"


def _softmax_moe(
    config: HFConfig, experts_key: str, ffn_key: str, shared: SharedExpertsConfig | None = None
) -> MoEConfig:
    """Builds softmax routing and experts. With norm_topk_prob, softmax is applied to the top-k logits only."""
    pre_softmax = not config.get("norm_topk_prob", False)
    num_experts, ffn_hidden_size = config.integer(experts_key), config.integer(ffn_key)
    return read_moe(config, num_experts, ffn_hidden_size, shared=shared, pre_softmax=pre_softmax)


def _qwen_layers(config: HFConfig, norm: NormConfig, mixer: AttentionConfig, moe: MoEConfig) -> tuple[LayerConfig, ...]:
    """Mixtral, Qwen or OLMoE layers. Every `decoder_sparse_step`-th layer is MoE, except those in `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return read_layers(config, norm, mixer, moe, lambda i: (i + 1) % step != 0 or i in dense)


def _deepseek_moe(config: HFConfig, grouped: bool, **options: Any) -> MoEConfig:
    """Builds a DeepSeek MoE layer, whose shared experts form one MLP. `grouped`: whether routing is limited to groups
    of experts. `options`: further arguments of `read_moe`."""
    ffn_hidden_size, num_shared = config.integer("moe_intermediate_size"), config.get("n_shared_experts", 0)
    if num_shared and "shared" not in options:
        options["shared"] = SharedExpertsConfig(mlp=read_mlp(config, num_shared * ffn_hidden_size))
    scaling_factor = float(config.get("routed_scaling_factor", 1.0))
    return read_moe(
        config,
        config.integer("n_routed_experts"),
        ffn_hidden_size,
        num_groups=config.get("n_group", 1) if grouped else None,
        group_topk=config.get("topk_group", 1) if grouped else None,
        scaling_factor=None if scaling_factor == 1.0 else scaling_factor,
        dtype="fp32",
        **options,
    )


def _deepseek_layers(config: HFConfig, moe: MoEConfig, interleaved: bool) -> tuple[LayerConfig, ...]:
    """DeepSeek layers: layer i is MoE if i >= `first_k_dense_replace` and `moe_layer_freq` divides i, else dense."""
    num_dense, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    mixer = _mla(config, interleaved)
    return read_layers(config, read_norm(config, 1e-6), mixer, moe, lambda i: i < num_dense or i % step != 0)


def _mla(config: HFConfig, interleaved: bool) -> MLAConfig:
    config.refuse_if(config.get("attention_bias", False), "has biases in its attention (attention_bias)")
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    rope = read_rope(config, rope_dim, 10000.0, interleaved)
    mscale = yarn_mscale(rope.scaling_factor, rope.mscale_all_dim) if rope.scaling == "yarn" else 1.0
    core = CoreAttentionConfig(
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * mscale**2, dropout=float(config.get("attention_dropout", 0.0))
    )
    return MLAConfig(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank", None),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_head_dim=nope_dim,
        qk_rope_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim"),
        core=core,
        rope=rope,
        qk_norm=True,
        norm=NormConfig(kind="RMSNorm", eps=_LATENT_NORM_EPS),
    )
