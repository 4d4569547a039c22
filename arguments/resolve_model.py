"""Converts checked flags to the `ModelConfig`."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from arguments import derive
from arguments.flags import Flags, from_flags
from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig, RopeConfig, yarn_mscale
from megatron_moe.config.component import FeedForwardConfig, MixerConfig, NoFeedForward, NoMixer
from megatron_moe.config.compressed_attention import OVERLAPPING_RATIO, CompressedAttentionConfig
from megatron_moe.config.dsa import DSAConfig, IndexerConfig
from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.functions import FunctionEntry, Options
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.precision import quantization_recipe
from megatron_moe.config.registry import (
    ACTIVATIONS,
    BALANCING,
    FEED_FORWARDS,
    METRICS,
    MIXERS,
    RESIDUALS,
    SCORE_FUNCTIONS,
    ComponentRegistry,
)
from megatron_moe.config.residual import AddedResidual
from megatron_moe.config.transport import HybridEPConfig, PushConfig

_LLAMA3_ORIGINAL_POSITIONS = 8192
"""Original context length in tokens of Llama 3's RoPE scaling. Megatron has no flag for it."""
_LOSS_CHUNK = 1024
"""Number of tokens per GEMM of the fused output layer and loss; enough to occupy a GPU."""


def model_config(flags: Flags, vocab_size: int) -> ModelConfig:
    """Builds the model config; `vocab_size` is the vocabulary size before padding."""
    fuses_output_layer = flags.cross_entropy_loss_fusion and flags.cross_entropy_fusion_impl == "linear"
    padded_size = derive.padded_vocab_size(flags, vocab_size)
    layers = layer_configs(flags)
    first, others = layers[: flags.moe_n_hash_layers], layers[flags.moe_n_hash_layers :]
    layers = (*(_hashed(layer, padded_size) for layer in first), *others)
    num_branches = sum(len(layer.sublayers) for layer in layers)
    return from_flags(
        ModelConfig,
        flags,
        vocab_size=padded_size,
        layers=layers,
        norm=_norm(flags),
        position_embedding="rope" if flags.position_embedding_type == "yarn" else flags.position_embedding_type,
        max_positions=flags.max_position_embeddings,
        tied_embeddings=not flags.untie_embeddings_and_output_weights,
        loss_chunk=_LOSS_CHUNK if fuses_output_layer else None,
        embedding_dropout=flags.hidden_dropout,
        mtp=_mtp(flags),
        init=InitConfig(
            std=flags.init_method_std,
            output_std=flags.init_method_std / math.sqrt(num_branches),
            embedding_std=flags.embedding_init_method_std,
            method="xavier_uniform" if flags.init_method_xavier_uniform else flags.init_method,
        ),
    )


def layer_configs(flags: Flags) -> tuple[LayerConfig, ...]:
    """Builds the config of every transformer layer. Equal layers are one object, so that they are compared fast."""
    mixers, feed_forwards = _selected(MIXERS, flags.mixer, flags), _selected(FEED_FORWARDS, flags.feed_forward, flags)
    layers = (_layer(flags, *modules) for modules in zip(mixers, feed_forwards, strict=True))
    distinct: dict[LayerConfig, LayerConfig] = {}
    return tuple(distinct.setdefault(layer, layer) for layer in layers)


def _hashed(layer: LayerConfig, vocab_size: int) -> LayerConfig:
    """Returns a copy of the layer config with hash routing (the token id selects the experts). A layer without experts
    is returned unchanged."""
    if layer.moe is None:
        return layer
    router = replace(layer.moe.router, hash_vocab_size=vocab_size, expert_bias=False)
    return replace(layer, feed_forward=replace(layer.moe, router=router))


def _layer(flags: Flags, mixer: MixerConfig, feed_forward: FeedForwardConfig) -> LayerConfig:
    return LayerConfig(
        mixer=mixer,
        feed_forward=feed_forward,
        norm=_norm(flags),
        hidden_dropout=flags.hidden_dropout,
        residual=RESIDUALS.get(flags.residual_connection)(flags),
    )


def _hyper_connections(flags: Flags) -> HyperConnectionsConfig:
    return HyperConnectionsConfig(
        num_streams=flags.num_residual_streams,
        sinkhorn_iterations=flags.mhc_sinkhorn_iterations,
        init_gating_factor=flags.mhc_init_gating_factor,
        norm_eps=flags.norm_epsilon,
    )


def _selected(registry: ComponentRegistry[Any], names: tuple[str, ...], flags: Flags) -> list[Any]:
    """Config of every layer's module: `names` repeat over the layers, and each entry has a config for every layer."""
    repeated = derive.repeat_names(names, flags.num_layers)
    columns = {name: registry.get(name)(flags) for name in dict.fromkeys(repeated)}
    return [columns[name][layer] for layer, name in enumerate(repeated)]


def _norm(flags: Flags) -> NormConfig:
    return NormConfig(kind=flags.normalization, eps=flags.norm_epsilon, zero_centered=flags.apply_layernorm_1p)


def _mtp(flags: Flags) -> MTPConfig | None:
    if not flags.mtp_num_layers:
        return None
    names = (flags.mtp_mixer, flags.mixer), (flags.mtp_feed_forward, flags.feed_forward)
    last = (each or derive.repeat_names(others, flags.num_layers)[-1] for each, others in names)
    columns = [registry.get(name)(flags) for registry, name in zip((MIXERS, FEED_FORWARDS), last, strict=True)]
    differs = flags.mtp_mixer or flags.mtp_feed_forward or any(len(column) > flags.num_layers for column in columns)
    return from_flags(
        MTPConfig,
        flags,
        prefix="mtp_",
        layer=_layer(flags, *(column[-1] for column in columns)) if differs else None,
        repeated_layer=flags.mtp_use_repeated_layer,
    )


def _mixers(flags: Flags) -> tuple[MixerConfig, ...]:
    if flags.experimental_attention_variant == "dsa":
        return _dsa(flags)
    if flags.experimental_attention_variant == "dsv4_hybrid":
        return _compressed_attention(flags)
    softmax = _mla(flags) if flags.multi_latent_attention else _attention(flags)
    is_linear = from_flags(derive.linear_attention_layers, flags)
    if not any(is_linear):
        return softmax
    assert flags.experimental_attention_variant is not None, "a rule requires it"
    linear = MIXERS.get(derive.DELTA_NETS[flags.experimental_attention_variant])(flags)
    return tuple(own if on else each for on, own, each in zip(is_linear, linear, softmax, strict=True))


def _delta_net(kind: type[GatedDeltaNetConfig], flags: Flags) -> tuple[GatedDeltaNetConfig, ...]:
    config = from_flags(
        kind,
        flags,
        prefix="linear_",
        conv_width=flags.linear_conv_kernel_dim,
        cp_mode=flags.linear_cp_mode,
        norm=NormConfig(kind="RMSNorm", eps=flags.norm_epsilon),
    )
    return (config,) * flags.num_layers


def _mamba(flags: Flags) -> tuple[MambaConfig, ...]:
    config = MambaConfig(
        hidden_size=flags.hidden_size,
        num_key_heads=flags.mamba_num_groups,
        num_value_heads=derive.mamba_heads(flags),
        key_head_dim=flags.mamba_state_dim,
        value_head_dim=flags.mamba_head_dim,
        conv_width=derive.MAMBA_CONV_WIDTH,
        cp_mode=flags.linear_cp_mode,
        norm=NormConfig(kind="RMSNorm", eps=flags.norm_epsilon),
    )
    return (config,) * flags.num_layers


def _feed_forwards(flags: Flags) -> tuple[FeedForwardConfig, ...]:
    moe_layers = from_flags(derive.moe_layers, flags)
    configs = {is_moe: moe_config(flags) if is_moe else _dense(flags) for is_moe in set(moe_layers)}
    return tuple(configs[is_moe] for is_moe in moe_layers)


def _cores(flags: Flags, scale: float) -> Iterator[CoreAttentionConfig]:
    windowed, exchanges = from_flags(derive.windowed_layers, flags), from_flags(derive.context_exchanges, flags)
    for has_window, exchange in zip(windowed, exchanges, strict=True):
        yield CoreAttentionConfig(
            softmax_scale=scale,
            window=flags.window_size if has_window else None,
            context_exchange=exchange,
            sinks=flags.softmax_type == "learnable",
            off_by_one=flags.softmax_type == "off-by-one",
            dropout=flags.attention_dropout,
        )


def _attention(flags: Flags) -> tuple[AttentionConfig, ...]:
    head_dim = derive.head_dim(flags)
    has_rope = flags.position_embedding_type in ("rope", "yarn")
    rope = _rope(flags, head_dim) if has_rope else None
    scope = {"head": "per_head", "all-heads": "full"}[flags.qk_layernorm_over] if flags.qk_layernorm else "none"
    common = from_flags(
        AttentionConfig,
        flags,
        num_heads=flags.num_attention_heads,
        num_query_groups=flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads,
        head_dim=head_dim,
        core=CoreAttentionConfig(softmax_scale=1.0),
        rope=rope,
        qk_norm="l2" if flags.qk_l2_norm else scope,
        norm=_norm(flags),
        qkv_bias=flags.add_bias_linear or flags.add_qkv_bias,
        out_bias=flags.add_bias_linear,
        output_gate=flags.attention_output_gate,
    )
    layers = zip(_cores(flags, head_dim**-0.5), from_flags(derive.rotated_layers, flags), strict=True)
    return tuple(replace(common, core=core, rope=rope if rotated else None) for core, rotated in layers)


def _rope(flags: Flags, head_dim: int) -> RopeConfig:
    """Builds the RoPE config of attention without latent projections."""
    dim = int(head_dim * flags.rotary_percent)
    if flags.position_embedding_type == "yarn":
        length = flags.yarn_original_max_position_embeddings or derive.YARN_LENGTH
        return _yarn(flags, dim, flags.rotary_interleaved, length)
    unscaled = RopeConfig(dim=dim, base=flags.rotary_base, interleaved=flags.rotary_interleaved)
    if flags.use_rope_scaling:
        return replace(
            unscaled,
            scaling="llama3",
            scaling_factor=flags.rope_scaling_factor,
            original_max_positions=_LLAMA3_ORIGINAL_POSITIONS,
        )
    factor = flags.rotary_seq_len_interpolation_factor
    if factor is not None and factor != 1:
        return replace(unscaled, scaling="linear", scaling_factor=float(factor))
    return unscaled


def _yarn(flags: Flags, dim: int, interleaved: bool, original_max_positions: int) -> RopeConfig:
    fast, slow = derive.yarn_betas(flags)
    return from_flags(
        RopeConfig,
        flags,
        dim=dim,
        base=flags.rotary_base,
        interleaved=interleaved,
        scaling="yarn",
        scaling_factor=flags.rotary_scaling_factor,
        original_max_positions=original_max_positions,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flags.yarn_correction_range_round_to_int,
    )


def _mla(flags: Flags) -> tuple[MLAConfig, ...]:
    rope_dim, gain = flags.qk_pos_emb_head_dim, 1.0
    rope: RopeConfig | None = None
    if flags.rope_type == "rope":
        rope = RopeConfig(dim=rope_dim, base=flags.rotary_base, interleaved=True)
    elif derive.mla_has_yarn(flags):
        rope = _yarn(flags, rope_dim, True, flags.original_max_position_embeddings)
        gain = yarn_mscale(flags.rotary_scaling_factor, flags.mscale_all_dim)
    common = from_flags(
        MLAConfig,
        flags,
        num_heads=flags.num_attention_heads,
        qk_rope_dim=rope_dim,
        core=CoreAttentionConfig(softmax_scale=1.0),
        rope=rope,
        qk_norm=flags.qk_layernorm,
        norm=_norm(flags),
    )
    scale = gain * gain * (flags.qk_head_dim + rope_dim) ** -0.5
    return tuple(replace(common, core=core) for core in _cores(flags, scale))


def _dsa(flags: Flags) -> tuple[DSAConfig, ...]:
    latent, eps = _mla(flags), flags.dsa_indexer_k_norm_epsilon
    norm = NormConfig(kind="LayerNorm", eps=flags.norm_epsilon if eps is None else eps)
    assert latent[0].rope is not None, "a rule requires it"
    indexer = _indexer(flags, replace(latent[0].rope, interleaved=flags.dsa_indexer_rope_interleaved), norm)
    if indexer.topk_freq > 1:
        latent = (*latent, latent[-1])  # that of multi-token prediction, which follows the last layer
    return tuple(
        DSAConfig.of(each, indexer, reuses_topk=indexer.layer_reuses_topk(layer)) for layer, each in enumerate(latent)
    )


def _indexer(flags: Flags, rope: RopeConfig, norm: NormConfig) -> IndexerConfig:
    assert flags.dsa_indexer_n_heads and flags.dsa_indexer_head_dim and flags.dsa_indexer_topk
    return IndexerConfig(
        num_heads=flags.dsa_indexer_n_heads,
        head_dim=flags.dsa_indexer_head_dim,
        topk=flags.dsa_indexer_topk,
        rope=rope,
        norm=norm,
        relu=flags.dsa_indexer_scoring_relu,
        rotate_activation=flags.dsa_indexer_rotate_activation,
        indexer_loss_coeff=flags.dsa_indexer_loss_coeff or 0.0,
        sparse_indexer_loss=flags.dsa_indexer_use_sparse_loss,
        topk_freq=flags.dsa_indexer_topk_freq,
        skip_topk_offset=flags.dsa_indexer_skip_topk_offset,
    )


def _compressed_attention(flags: Flags) -> tuple[CompressedAttentionConfig, ...]:
    """Compressed-attention configs of all layers, plus one for multi-token prediction if a ratio is given for it."""
    dim, norm = flags.qk_pos_emb_head_dim, _norm(flags)
    plain = RopeConfig(dim=dim, base=flags.rotary_base, interleaved=True)
    yarn = _yarn(flags, dim, True, flags.original_max_position_embeddings)
    # the factor on cos and sin is left out, so that rotations keep norms
    scaled = replace(yarn, base=flags.csa_compress_rotary_base, concentration=1.0)
    common = from_flags(
        CompressedAttentionConfig,
        flags,
        num_heads=flags.num_attention_heads,
        head_dim=flags.v_head_dim,
        ratio=0,
        indexer=None,
        rope=plain,
        norm=norm,
    )
    assert isinstance(flags.csa_compress_ratios, tuple)
    layers = []
    for ratio in flags.csa_compress_ratios:
        chooses = ratio == OVERLAPPING_RATIO and not flags.csa_dense_mode
        indexer = _indexer(flags, scaled, norm) if chooses else None
        layers.append(replace(common, ratio=ratio, indexer=indexer, rope=scaled if ratio else plain))
    return tuple(layers)


def _activation(flags: Flags) -> ActivationConfig:
    gated = ActivationConfig(gated=True, clamp=flags.activation_func_clamp_value, linear_offset=flags.glu_linear_offset)
    if flags.activation_func is not None:
        base, kind = gated if flags.gated_linear_unit else ActivationConfig(), flags.activation_func
        return replace(base, kind=kind, options=_options(flags, ACTIVATIONS.get(kind)))
    if flags.swiglu:
        return replace(gated, kind="silu")
    if flags.quick_geglu:
        return replace(gated, kind="quick_gelu")
    if flags.geglu:
        return gated
    if flags.squared_relu:
        return ActivationConfig(kind="squared_relu")
    return ActivationConfig(kind="gelu_tanh" if flags.openai_gelu else "gelu")


def _options(flags: Flags, *entries: FunctionEntry) -> Options:
    """Values of the flags that registered functions request."""
    names = dict.fromkeys(name for entry in entries for name in entry.options)
    return tuple((name, getattr(flags, name)) for name in names)


def _dense(flags: Flags) -> MLPConfig:
    return MLPConfig(
        hidden_size=flags.hidden_size,
        ffn_hidden_size=derive.ffn_hidden_size(flags),
        activation=_activation(flags),
        bias=flags.add_bias_linear,
    )


def moe_config(flags: Flags) -> MoEConfig:
    factor, pad = derive.capacity_factor(flags), flags.moe_pad_expert_input_to_capacity
    return MoEConfig(
        router=_router(flags),
        experts=_experts(flags),
        capacity=None if factor is None else CapacityConfig(factor=factor, policy=flags.moe_token_drop_policy, pad=pad),
        shared=_shared(flags),
        latent_size=flags.moe_latent_size,
        dispatcher=flags.moe_token_dispatcher_type,
        transport_backend=derive.transport_backend(flags),
        expert_rank_capacity_factor=derive.row_capacity_factor(flags),
        push=PushConfig(num_sms=flags.moe_flex_dispatcher_num_sms),
        hybridep=from_flags(
            HybridEPConfig,
            flags,
            prefix="moe_hybridep_",
            num_sms=flags.moe_flex_dispatcher_num_sms,
            fuse_permute=flags.moe_permute_fusion_into_hybridep,
        ),
        fp8_dispatch=flags.moe_dispatch_fwd_dtype != "bf16",
        fp8_combine_grad=flags.moe_combine_bwd_dtype != "bf16",
        echo=from_flags(EchoConfig, flags) if flags.moe_enable_echo else None,
        shared_overlap=flags.moe_shared_expert_overlap,
        row_alignment=_row_alignment(flags),
    )


def _row_alignment(flags: Flags) -> int:
    if not flags.moe_router_padding_for_quantization or not (flags.fp8_format or flags.fp4_format):
        return 1
    return quantization_recipe(flags.fp4_recipe if flags.fp4_format else flags.fp8_recipe).row_alignment


def _router(flags: Flags) -> RouterConfig:
    assert flags.num_experts
    return from_flags(
        RouterConfig,
        flags,
        prefix="moe_router_",
        scaling_factor=flags.moe_router_topk_scaling_factor or None,
        expert_bias=flags.moe_router_enable_expert_bias,
        balancing=flags.moe_router_load_balancing_type,
        aux_loss_coeffs=flags.moe_aux_loss_coeff,
        z_loss_coeff=flags.moe_z_loss_coeff,
        input_jitter_eps=flags.moe_input_jitter_eps,
        force_balancing=flags.moe_router_force_load_balancing,
        linear_bias=flags.add_bias_linear,
        quantile_ema=flags.moe_router_quantile_balancing_ema,
        options=_options(
            flags,
            SCORE_FUNCTIONS.get(flags.moe_router_score_function),
            *map(BALANCING.get, flags.moe_router_load_balancing_type),
            *map(METRICS.get, METRICS.names()),
        ),
    )


def _experts(flags: Flags) -> ExpertsConfig:
    assert flags.num_experts
    return ExpertsConfig(
        num_experts=flags.num_experts,
        hidden_size=flags.moe_latent_size or flags.hidden_size,
        ffn_hidden_size=flags.moe_ffn_hidden_size or derive.ffn_hidden_size(flags),
        activation=_activation(flags),
        bias=flags.add_bias_linear,
        grouped=flags.moe_grouped_gemm,
        probs_on_input=flags.moe_apply_probs_on_input,
        probs_on_output=not flags.moe_memory_efficient_permutation,
    )


def _shared(flags: Flags) -> SharedExpertsConfig | None:
    if not flags.moe_shared_expert_intermediate_size:
        return None
    mlp = MLPConfig(
        hidden_size=flags.hidden_size,
        ffn_hidden_size=flags.moe_shared_expert_intermediate_size,
        activation=_activation(flags),
    )
    return SharedExpertsConfig(mlp=mlp, gate=flags.moe_shared_expert_gate)


RESIDUALS.register("auto", lambda flags: RESIDUALS.get(derive.residual_connection(flags))(flags))
RESIDUALS.register("added", lambda flags: AddedResidual(from_norm=flags.apply_residual_connection_post_layernorm))
RESIDUALS.register("hyper_connections", _hyper_connections)
MIXERS.register("auto", _mixers)
MIXERS.register("attention", _attention)
MIXERS.register("mla", _mla)
MIXERS.register("dsa", _dsa)
MIXERS.register("compressed_attention", _compressed_attention)
MIXERS.register("gated_delta_net", partial(_delta_net, GatedDeltaNetConfig))
MIXERS.register("kimi_delta_attention", partial(_delta_net, KimiDeltaAttentionConfig))
MIXERS.register("mamba", _mamba)
MIXERS.register("none", lambda flags: (NoMixer(hidden_size=flags.hidden_size),) * flags.num_layers)
FEED_FORWARDS.register("auto", _feed_forwards)
FEED_FORWARDS.register("mlp", lambda flags: (_dense(flags),) * flags.num_layers)
FEED_FORWARDS.register("none", lambda flags: (NoFeedForward(),) * flags.num_layers)
FEED_FORWARDS.register("moe", lambda flags: (moe_config(flags),) * flags.num_layers)
