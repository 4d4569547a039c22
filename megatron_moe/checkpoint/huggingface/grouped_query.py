"""Families with grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, GLM-4.5-MoE."""

from typing import Any, Literal

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_layers,
    read_mlp,
    read_moe,
    read_norm,
    read_rope,
)
from megatron_moe.checkpoint.huggingface.deepseek import read_sigmoid_moe
from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import ActivationConfig, MoEConfig, SharedExpertsConfig


def mixtral(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Mixtral (arXiv 2401.04088): softmax over the top-k logits."""
    norm = read_norm(config, 1e-5)
    mixer = _attention(config, norm, default_base=1e6, window=config.get("sliding_window", None))
    num_experts, ffn_hidden_size = config.integer("num_local_experts"), config.integer("intermediate_size")
    return _layers(config, norm, mixer, read_moe(config, num_experts, ffn_hidden_size, pre_softmax=False))


def qwen2_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Qwen2-MoE: biases on q, k and v, and a gated shared expert."""
    config.refuse_if(config.get("use_sliding_window", False), "has sliding windows in some layers (use_sliding_window)")
    norm = read_norm(config, 1e-6)
    mixer = _attention(config, norm, qkv_bias=config.get("qkv_bias", True))
    shared = SharedExpertsConfig(mlp=read_mlp(config, config.integer("shared_expert_intermediate_size")), gate=True)
    moe = _softmax_moe(config, "num_experts", "moe_intermediate_size", shared)
    return _layers(config, norm, mixer, moe)


def qwen3_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Qwen3-MoE (arXiv 2505.09388): norms of q and k per head, no shared expert."""
    norm, bias = read_norm(config, 1e-6), config.get("attention_bias", False)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    mixer = _attention(config, norm, qk_norm="per_head", qkv_bias=bias, out_bias=bias, window=window)
    return _layers(config, norm, mixer, _softmax_moe(config, _experts_key(config), "moe_intermediate_size"))


def olmoe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """OLMoE (arXiv 2409.02060): norms of q and k over all heads."""
    config.refuse_if(config.get("clip_qkv", None) is not None, "clips q, k and v (clip_qkv)")
    norm, bias = read_norm(config, 1e-5), config.get("attention_bias", False)
    mixer = _attention(config, norm, qk_norm="full", qkv_bias=bias, out_bias=bias)
    return _layers(config, norm, mixer, _softmax_moe(config, "num_experts", "intermediate_size"))


def gpt_oss(config: HFConfig) -> tuple[LayerConfig, ...]:
    """GPT-OSS (arXiv 2508.10925): attention sinks, alternating windows, biases everywhere, clamped GeGLU."""
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
    kinds = config.get("layer_types", [*mixers] * num_layers)[:num_layers]
    unknown = sorted({str(kind) for kind in kinds} - set(mixers))
    config.refuse_if(bool(unknown), f"has layers of the types {', '.join(unknown)} (layer_types)")
    config.refuse_if(len(kinds) < num_layers, f"has {num_layers} layers and {len(kinds)} layer_types")
    return tuple(LayerConfig(mixer=mixers[kind], feed_forward=moe, norm=norm) for kind in kinds)


def glm4_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """GLM-4.5 (arXiv 2508.06471): half of each head rotated, DeepSeek-V3's MoE layer, first layers dense."""
    norm = read_norm(config, 1e-5)
    qk_norm: Literal["per_head", "none"] = "per_head" if config.get("use_qk_norm", False) else "none"
    bias, num_dense = config.get("attention_bias", False), config.integer("first_k_dense_replace")
    mixer = _attention(config, norm, qk_norm=qk_norm, qkv_bias=bias, rotary_factor=0.5)
    return read_layers(config, norm, mixer, read_sigmoid_moe(config), lambda i: i < num_dense)


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
    """Reads the attention; `options` are fields of AttentionConfig.

    Args:
        window: sliding window including the token itself, which `CoreAttentionConfig.window` excludes.
        rotary_factor: default of `partial_rotary_factor`.
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
    """Key of the number of experts, which depends on the version of transformers that wrote the file."""
    return "num_experts" if "num_experts" in config.values else "num_local_experts"


def _softmax_moe(
    config: HFConfig, experts_key: str, ffn_key: str, shared: SharedExpertsConfig | None = None
) -> MoEConfig:
    """Renormalising after top-k (norm_topk_prob) equals a softmax over the top-k logits."""
    pre_softmax = not config.get("norm_topk_prob", False)
    num_experts, ffn_hidden_size = config.integer(experts_key), config.integer(ffn_key)
    return read_moe(config, num_experts, ffn_hidden_size, shared=shared, pre_softmax=pre_softmax)


def _layers(config: HFConfig, norm: NormConfig, mixer: AttentionConfig, moe: MoEConfig) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer is MoE unless `mlp_only_layers` lists it (Qwen)."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return read_layers(config, norm, mixer, moe, lambda i: (i + 1) % step != 0 or i in dense)
