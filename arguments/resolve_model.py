"""Converts checked flags to the `ModelConfig`."""

import math
from dataclasses import replace

from arguments import derive
from arguments.flags import Flags, from_flags
from megatron_moe.config.attention import (
    AttentionConfig,
    ContextExchange,
    CoreAttentionConfig,
    MLAConfig,
    NormConfig,
    RopeConfig,
    yarn_mscale,
)
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import (
    ActivationConfig,
    CapacityConfig,
    ExpertsConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
)

_LLAMA3_ORIGINAL_POSITIONS = 8192
"""Original context length in Llama 3's RoPE scaling; Megatron has no flag for it."""
_LOSS_CHUNK = 1024
"""Tokens per GEMM of the fused output layer; enough to fill a GPU."""


def model_config(flags: Flags, vocab_size: int) -> ModelConfig:
    """Builds the model config for a vocabulary size before padding."""
    model = flags.model
    return from_flags(
        ModelConfig,
        flags,
        vocab_size=from_flags(derive.pad_vocab_size, flags, vocab_size=vocab_size),
        layers=_layers(flags),
        norm=_norm(flags),
        position_embedding="rope" if model.position_embedding_type == "yarn" else model.position_embedding_type,
        max_positions=model.max_position_embeddings,
        tied_embeddings=not model.untie_embeddings_and_output_weights,
        loss_chunk=_LOSS_CHUNK if _fuses_output_layer(flags) else None,
        embedding_dropout=model.hidden_dropout,
        mtp=_mtp(flags),
        init=InitConfig(
            std=model.init_method_std,
            output_std=model.init_method_std / math.sqrt(2 * model.num_layers),
            embedding_std=model.embedding_init_method_std,
            method="xavier_uniform" if model.init_method_xavier_uniform else model.init_method,
        ),
    )


def _fuses_output_layer(flags: Flags) -> bool:
    return flags.kernels.cross_entropy_loss_fusion and flags.kernels.cross_entropy_fusion_impl == "linear"


def _layers(flags: Flags) -> tuple[LayerConfig, ...]:
    model = flags.model
    layers = zip(
        from_flags(derive.moe_layers, flags),
        from_flags(derive.windowed_layers, flags),
        from_flags(derive.rotated_layers, flags),
        from_flags(derive.context_exchanges, flags),
        strict=True,
    )
    return tuple(
        LayerConfig(
            mixer=_mixer(flags, windowed, rotated, exchange),
            feed_forward=moe_config(flags) if is_moe else _dense(flags),
            norm=_norm(flags),
            hidden_dropout=model.hidden_dropout,
            residual_from_norm=model.apply_residual_connection_post_layernorm,
        )
        for is_moe, windowed, rotated, exchange in layers
    )


def _norm(flags: Flags) -> NormConfig:
    model = flags.model
    return NormConfig(kind=model.normalization, eps=model.norm_epsilon, zero_centered=model.apply_layernorm_1p)


def _mtp(flags: Flags) -> MTPConfig | None:
    model = flags.model
    if not model.mtp_num_layers:
        return None
    return MTPConfig(
        num_layers=model.mtp_num_layers,
        loss_scaling_factor=model.mtp_loss_scaling_factor,
        repeated_layer=model.mtp_use_repeated_layer,
        detach_heads=model.mtp_detach_heads,
    )


def _mixer(flags: Flags, windowed: bool, rotated: bool, exchange: ContextExchange) -> AttentionConfig | MLAConfig:
    latent = flags.attention.multi_latent_attention
    mixer = _mla(flags, windowed) if latent else _attention(flags, windowed, rotated)
    return replace(mixer, core=replace(mixer.core, context_exchange=exchange))


def _core(flags: Flags, scale: float, windowed: bool) -> CoreAttentionConfig:
    attention = flags.attention
    return CoreAttentionConfig(
        softmax_scale=scale,
        window=attention.window_size if windowed else None,
        sinks=attention.softmax_type == "learnable",
        off_by_one=attention.softmax_type == "off-by-one",
        dropout=attention.attention_dropout,
    )


def _attention(flags: Flags, windowed: bool, rotated: bool) -> AttentionConfig:
    model, attention = flags.model, flags.attention
    head_dim = from_flags(derive.head_dim, flags)
    has_rope = rotated and model.position_embedding_type in ("rope", "yarn")
    scope = {"head": "per_head", "all-heads": "full"}[attention.qk_layernorm_over] if attention.qk_layernorm else "none"
    return from_flags(
        AttentionConfig,
        flags,
        num_heads=attention.num_attention_heads,
        **({} if attention.group_query_attention else {"num_query_groups": attention.num_attention_heads}),
        head_dim=head_dim,
        core=_core(flags, head_dim**-0.5, windowed),
        rope=_rope(flags, head_dim) if has_rope else None,
        qk_norm="l2" if attention.qk_l2_norm else scope,
        norm=_norm(flags),
        qkv_bias=model.add_bias_linear or attention.add_qkv_bias,
        out_bias=model.add_bias_linear,
        output_gate=attention.attention_output_gate,
    )


def _rope(flags: Flags, head_dim: int) -> RopeConfig:
    """Rotary embedding of grouped-query attention."""
    model = flags.model
    dim = int(head_dim * model.rotary_percent)
    if model.position_embedding_type == "yarn":
        length = model.yarn_original_max_position_embeddings or derive.YARN_LENGTH
        return _yarn(flags, dim, model.rotary_interleaved, length)
    unscaled = RopeConfig(dim=dim, base=model.rotary_base, interleaved=model.rotary_interleaved)
    if model.use_rope_scaling:
        return replace(
            unscaled,
            scaling="llama3",
            scaling_factor=model.rope_scaling_factor,
            original_max_positions=_LLAMA3_ORIGINAL_POSITIONS,
        )
    factor = model.rotary_seq_len_interpolation_factor
    if factor is not None and factor != 1:
        return replace(unscaled, scaling="linear", scaling_factor=float(factor))
    return unscaled


def _yarn(flags: Flags, dim: int, interleaved: bool, original_max_positions: int) -> RopeConfig:
    model, attention = flags.model, flags.attention
    fast, slow = from_flags(derive.yarn_turns, flags)
    return from_flags(
        RopeConfig,
        flags,
        dim=dim,
        base=model.rotary_base,
        interleaved=interleaved,
        scaling="yarn",
        scaling_factor=attention.rotary_scaling_factor,
        original_max_positions=original_max_positions,
        beta_fast=fast,
        beta_slow=slow,
        truncate=model.yarn_correction_range_round_to_int,
    )


def _mla(flags: Flags, windowed: bool) -> MLAConfig:
    model, attention = flags.model, flags.attention
    rope_dim = attention.qk_pos_emb_head_dim
    gain = 1.0
    if attention.rope_type == "rope":
        rope = RopeConfig(dim=rope_dim, base=model.rotary_base, interleaved=True)
    else:
        rope = _yarn(flags, rope_dim, True, attention.original_max_position_embeddings)
        gain = yarn_mscale(attention.rotary_scaling_factor, attention.mscale_all_dim)
    return from_flags(
        MLAConfig,
        flags,
        num_heads=attention.num_attention_heads,
        qk_rope_dim=rope_dim,
        core=_core(flags, gain * gain * (attention.qk_head_dim + rope_dim) ** -0.5, windowed),
        rope=rope,
        qk_norm=attention.qk_layernorm,
        norm=_norm(flags),
    )


def _activation(flags: Flags) -> ActivationConfig:
    model = flags.model
    gated = ActivationConfig(gated=True, clamp=model.activation_func_clamp_value, linear_offset=model.glu_linear_offset)
    if model.swiglu:
        return replace(gated, kind="silu")
    if model.quick_geglu:
        return replace(gated, kind="quick_gelu")
    if model.geglu:
        return gated
    if model.squared_relu:
        return ActivationConfig(kind="squared_relu")
    return ActivationConfig(kind="gelu_tanh" if model.openai_gelu else "gelu")


def _dense(flags: Flags) -> MLPConfig:
    model = flags.model
    return MLPConfig(
        hidden_size=model.hidden_size,
        ffn_hidden_size=from_flags(derive.ffn_hidden_size, flags),
        activation=_activation(flags),
        bias=model.add_bias_linear,
    )


def moe_config(flags: Flags) -> MoEConfig:
    moe = flags.moe
    capacity = None
    if moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0:
        capacity = CapacityConfig(
            factor=moe.moe_expert_capacity_factor,
            policy=moe.moe_token_drop_policy,
            pad=moe.moe_pad_expert_input_to_capacity,
        )
    return MoEConfig(
        router=_router(flags),
        experts=_experts(flags),
        capacity=capacity,
        shared=_shared(flags),
        latent_size=moe.moe_latent_size,
        dispatcher=moe.moe_token_dispatcher_type,
        expert_rank_capacity_factor=moe.moe_expert_rank_capacity_factor,
        flex_dispatcher_num_sms=moe.moe_flex_dispatcher_num_sms,
        shared_overlap=moe.moe_shared_expert_overlap,
    )


def _router(flags: Flags) -> RouterConfig:
    moe = flags.moe
    assert moe.num_experts
    return from_flags(
        RouterConfig,
        flags,
        topk=moe.moe_router_topk,
        score_function=moe.moe_router_score_function,
        pre_softmax=moe.moe_router_pre_softmax,
        num_groups=moe.moe_router_num_groups,
        group_topk=moe.moe_router_group_topk,
        scaling_factor=moe.moe_router_topk_scaling_factor or None,
        expert_bias=moe.moe_router_enable_expert_bias,
        bias_update_rate=moe.moe_router_bias_update_rate,
        balancing=moe.moe_router_load_balancing_type,
        aux_loss_coeffs=moe.moe_aux_loss_coeff,
        z_loss_coeff=moe.moe_z_loss_coeff,
        input_jitter_eps=moe.moe_input_jitter_eps,
        dtype=moe.moe_router_dtype,
        force_balancing=moe.moe_router_force_load_balancing,
        force_biased=moe.moe_router_force_biased,
        linear_bias=flags.model.add_bias_linear,
        quantile_ema=moe.moe_router_quantile_balancing_ema,
    )


def _experts(flags: Flags) -> ExpertsConfig:
    model, moe = flags.model, flags.moe
    assert moe.num_experts
    return ExpertsConfig(
        num_experts=moe.num_experts,
        hidden_size=moe.moe_latent_size or model.hidden_size,
        ffn_hidden_size=moe.moe_ffn_hidden_size or from_flags(derive.ffn_hidden_size, flags),
        activation=_activation(flags),
        bias=model.add_bias_linear,
        grouped=moe.moe_grouped_gemm,
        probs_on_input=moe.moe_apply_probs_on_input,
        probs_on_output=not moe.moe_memory_efficient_permutation,
    )


def _shared(flags: Flags) -> SharedExpertsConfig | None:
    moe = flags.moe
    if not moe.moe_shared_expert_intermediate_size:
        return None
    mlp = MLPConfig(
        hidden_size=flags.model.hidden_size,
        ffn_hidden_size=moe.moe_shared_expert_intermediate_size,
        activation=_activation(flags),
    )
    return SharedExpertsConfig(mlp=mlp, gate=moe.moe_shared_expert_gate)
