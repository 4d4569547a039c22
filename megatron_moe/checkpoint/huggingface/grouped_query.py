"""Families with grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, GLM-4.5-MoE."""

from typing import Literal

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_activation,
    read_mlp,
    read_norm,
    read_rope,
)
from megatron_moe.checkpoint.huggingface.sigmoid_router import read_sigmoid_moe
from megatron_moe.config.attention import (
    AttentionConfig,
    CoreAttentionConfig,
    NormConfig,
)
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import (
    ActivationConfig,
    ExpertsConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
)


def mixtral(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2401.04088. Softmax over the chosen k logits."""
    norm = read_norm(config, 1e-5)
    mixer = _attention(config, norm, default_base=1e6, window=config.get("sliding_window", None))
    moe = _softmax_moe(config, "num_local_experts", config.integer("intermediate_size"), renormalised=True)
    return _layers(config, norm, mixer, moe)


def qwen2_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Biases on q, k and v; a gated shared expert; probabilities of the softmax over all experts, not renormalised."""
    config.refuse_if(config.get("use_sliding_window", False), "has sliding windows in some layers (use_sliding_window)")
    norm = read_norm(config, 1e-6)
    mixer = _attention(config, norm, qkv_bias=config.get("qkv_bias", True))
    shared = SharedExpertsConfig(mlp=read_mlp(config, config.integer("shared_expert_intermediate_size")), gate=True)
    moe = _softmax_moe(config, "num_experts", config.integer("moe_intermediate_size"), shared=shared)
    return _layers(config, norm, mixer, moe)


def qwen3_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2505.09388. Norm of q and k per head, no shared expert."""
    norm, biased = read_norm(config, 1e-6), config.get("attention_bias", False)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    mixer = _attention(config, norm, qk_norm="per_head", qkv_bias=biased, out_bias=biased, window=window)
    moe = _softmax_moe(config, _experts_key(config), config.integer("moe_intermediate_size"))
    return _layers(config, norm, mixer, moe)


def olmoe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2409.02060. Norm of q and k over all heads together."""
    config.refuse_if(config.get("clip_qkv", None) is not None, "clips q, k and v (clip_qkv)")
    norm, biased = read_norm(config, 1e-5), config.get("attention_bias", False)
    mixer = _attention(config, norm, qk_norm="full", qkv_bias=biased, out_bias=biased)
    moe = _softmax_moe(config, "num_experts", config.integer("intermediate_size"))
    return _layers(config, norm, mixer, moe)


def gpt_oss(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2508.10925. Attention sinks, windows in every second layer, biases everywhere, clamped GeGLU."""
    alpha, clamp = config.get("swiglu_alpha", 1.702), float(config.get("swiglu_limit", 7.0))
    config.refuse_if(alpha != 1.702, f"has a sigmoid gain of {alpha} in its activation")
    norm, biased = read_norm(config, 1e-5), config.get("attention_bias", True)
    full, windowed = (
        _attention(config, norm, 150000.0, qkv_bias=biased, out_bias=biased, sinks=True, window=window)
        for window in (None, config.get("sliding_window", 128))
    )
    hidden, num_experts = config.integer("hidden_size"), config.integer(_experts_key(config))
    activation = ActivationConfig(kind="quick_gelu", gated=True, clamp=clamp, linear_offset=1.0)
    moe = MoEConfig(
        router=RouterConfig(
            hidden_size=hidden, num_experts=num_experts, topk=config.integer("num_experts_per_tok"), linear_bias=True
        ),
        experts=ExpertsConfig(
            num_experts=num_experts,
            hidden_size=hidden,
            ffn_hidden_size=config.integer("intermediate_size"),
            activation=activation,
            bias=True,
        ),
    )
    mixers = {"sliding_attention": windowed, "full_attention": full}
    num_layers = config.integer("num_hidden_layers")
    kinds = config.get("layer_types", [*mixers] * num_layers)[:num_layers]
    unknown = sorted({str(kind) for kind in kinds} - set(mixers))
    config.refuse_if(bool(unknown), f"has layers of the types {', '.join(unknown)} (layer_types)")
    config.refuse_if(len(kinds) < num_layers, f"has {num_layers} layers and {len(kinds)} layer_types")
    return tuple(LayerConfig(mixer=mixers[kind], feed_forward=moe, norm=norm) for kind in kinds)


def glm4_moe(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2508.06471 (GLM-4.5). Half of each head rotated, sigmoid router with expert bias, first layers dense."""
    norm = read_norm(config, 1e-5)
    qk_norm: Literal["per_head", "none"] = "per_head" if config.get("use_qk_norm", False) else "none"
    mixer = _attention(config, norm, qk_norm=qk_norm, qkv_bias=config.get("attention_bias", False), rotated_part=0.5)
    dense, num_dense = read_mlp(config, config.integer("intermediate_size")), config.integer("first_k_dense_replace")
    moe = read_sigmoid_moe(config)
    return tuple(
        LayerConfig(mixer=mixer, feed_forward=dense if index < num_dense else moe, norm=norm)
        for index in range(config.integer("num_hidden_layers"))
    )


def _attention(
    config: HFConfig,
    norm: NormConfig,
    default_base: float = 10000.0,
    *,
    qk_norm: Literal["none", "per_head", "full"] = "none",
    qkv_bias: bool = False,
    out_bias: bool = False,
    sinks: bool = False,
    window: int | None = None,
    rotated_part: float = 1.0,
) -> AttentionConfig:
    """`window` counts the own token, ours only those beside it. `rotated_part` of a head where the file says none."""
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
        rope=read_rope(config, head_dim, default_base, default_part=rotated_part),
        qk_norm=qk_norm,
        norm=norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def _experts_key(config: HFConfig) -> str:
    """Two names for the same number, depending on the version that wrote the file."""
    return "num_experts" if "num_experts" in config.values else "num_local_experts"


def _softmax_moe(
    config: HFConfig,
    experts_key: str,
    ffn_hidden_size: int,
    renormalised: bool | None = None,
    shared: SharedExpertsConfig | None = None,
) -> MoEConfig:
    """Probabilities that are renormalised after top-k are those of a softmax over the chosen logits."""
    if renormalised is None:
        renormalised = config.get("norm_topk_prob", False)
    hidden, num_experts = config.integer("hidden_size"), config.integer(experts_key)
    router = RouterConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        topk=config.integer("num_experts_per_tok"),
        pre_softmax=not renormalised,
    )
    experts = ExpertsConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden_size,
        activation=read_activation(config),
    )
    return MoEConfig(router=router, experts=experts, shared=shared)


def _layers(config: HFConfig, norm: NormConfig, mixer: AttentionConfig, moe: MoEConfig) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer is MoE unless it is listed in `mlp_only_layers` (Qwen)."""
    step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    feed_forwards: list[MLPConfig | MoEConfig] = [
        moe
        if (index + 1) % step == 0 and index not in dense_layers
        else read_mlp(config, config.integer("intermediate_size"))
        for index in range(config.integer("num_hidden_layers"))
    ]
    return tuple(LayerConfig(mixer=mixer, feed_forward=feed_forward, norm=norm) for feed_forward in feed_forwards)
