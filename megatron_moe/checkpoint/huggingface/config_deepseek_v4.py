"""Reads a config.json of DeepSeek-V4.

Published files list the layers in `compress_ratios` and `num_hash_layers`, those of transformers in `layer_types`,
`compress_rates` and `mlp_layer_types`. Both are read.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_activation,
    read_indexer,
    read_moe,
    read_norm,
    read_rope,
)
from megatron_moe.config.attention import RopeConfig
from megatron_moe.config.compressed_attention import OVERLAPPING_RATIO, CompressedAttentionConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig, SharedExpertsConfig

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""Values of `layer_types`: attention to a sliding window only, to a window and selected compressed entries, and to a
window and all compressed entries."""
HASH, ROUTED = "hash_moe", "moe"
"""Values of `mlp_layer_types`: hash-routed experts (the token id selects them), and experts selected by scores."""
DEFAULT_RATES: Mapping[str, int] = MappingProxyType({SPARSE: OVERLAPPING_RATIO, HEAVY: 128})
"""Compression ratios of layers with entries."""


def read_deepseek_v4(config: HFConfig) -> tuple[LayerConfig, ...]:
    """Builds the layers of DeepSeek-V4 and of its multi-token prediction: compressed attention, hyper-connections, and
    hash-routed experts in the first layers."""
    for key in ("attention_bias", "attention_dropout"):
        config.refuse_if(bool(config.get(key, False)), f"has {key}")
    num_layers, ratios = config.integer("num_hidden_layers"), _ratios(config)
    norm, experts = read_norm(config, 1e-6), _experts(config)
    router = replace(experts.router, hash_vocab_size=config.integer("vocab_size"), expert_bias=False)
    by_id, num_hash = replace(experts, router=router), config.get("num_hash_layers", 3)
    kinds = config.get("mlp_layer_types", [HASH] * num_hash + [ROUTED] * (num_layers - num_hash))
    unknown = sorted({*kinds} - {HASH, ROUTED})
    config.refuse_if(bool(unknown), f"has layers of the types {', '.join(unknown)} (mlp_layer_types)")
    config.refuse_if(len(kinds) != num_layers, f"has {num_layers} layers and {len(kinds)} mlp_layer_types")
    streams = HyperConnectionsConfig(
        num_streams=config.get("hc_mult", 4),
        sinkhorn_iterations=config.get("hc_sinkhorn_iters", 20),
        norm_eps=norm.eps,
        eps=float(config.get("hc_eps", 1e-6)),
    )
    mixers = {ratio: _mixer(config, ratio) for ratio in ratios}
    feed_forwards = [*(by_id if kind == HASH else experts for kind in kinds), experts]
    return tuple(
        LayerConfig(mixer=mixers[ratio], feed_forward=feed_forward, norm=norm, residual=streams)
        for ratio, feed_forward in zip(ratios, feed_forwards, strict=True)
    )


def _ratios(config: HFConfig) -> list[int]:
    """Compression ratios of the decoder layers and of the MTP layer."""
    num_layers, kinds = config.integer("num_hidden_layers"), config.get("layer_types", None)
    published = config.get("compress_ratios", [])
    last = published[num_layers] if len(published) > num_layers else 0
    if kinds is None:
        config.require("compress_ratios")
        ratios = list(published[:num_layers])
    else:
        rates = {WINDOW: 0, **DEFAULT_RATES, **config.get("compress_rates", {})}
        unknown = sorted({*kinds} - {*rates})
        config.refuse_if(bool(unknown), f"has layers of the types {', '.join(unknown)} (layer_types)")
        # the ratio decides whether a layer has an indexer
        other = {kind: rate for kind, rate in rates.items() if (rate == OVERLAPPING_RATIO) != (kind == SPARSE)}
        config.refuse_if(not other.keys().isdisjoint(kinds), f"has the compress_rates {other}")
        ratios = [rates[kind] for kind in kinds]
    config.refuse_if(len(ratios) != num_layers, f"has {num_layers} layers and {len(ratios)} compression ratios")
    return [*ratios, last]


def _mixer(config: HFConfig, ratio: int) -> CompressedAttentionConfig:
    config.refuse_if(ratio < 0 or ratio == 1, f"has groups of {ratio} tokens (compress_ratios)")
    norm, rope = read_norm(config, 1e-6), _rope(config, compressed=ratio > 0)
    return CompressedAttentionConfig(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        head_dim=config.integer("head_dim"),
        q_lora_rank=config.integer("q_lora_rank"),
        csa_window_size=config.integer("sliding_window"),
        ratio=ratio,
        indexer=read_indexer(config, rope, norm) if ratio == OVERLAPPING_RATIO else None,
        o_groups=config.integer("o_groups"),
        o_lora_rank=config.integer("o_lora_rank"),
        rope=rope,
        norm=norm,
    )


def _rope(config: HFConfig, *, compressed: bool) -> RopeConfig:
    """Rotary embedding of layers with or without entries. transformers writes both under `rope_parameters`; published
    files have one `rope_scaling`, which applies to layers with entries."""
    head_dim = config.integer("head_dim")
    both: dict[str, Any] = config.get("rope_parameters", None) or config.get("rope_scaling", {})
    key, base = ("compress_rope_theta", 160000.0) if compressed else ("rope_theta", 10000.0)
    if "compress" in both:
        parameters = both["compress" if compressed else "main"]
    else:
        # with YaRN, cos and sin are not multiplied by a factor
        parameters = {"attention_factor": 1.0, **both} if compressed else {}
        parameters |= {"rope_theta": config.get(key, base)}
    values = {**config.values, "rope_parameters": parameters, "rope_scaling": None}
    factor = config.get("qk_rope_head_dim", head_dim / 8) / head_dim
    return read_rope(HFConfig(values), head_dim, base, interleaved=True, default_rotary_factor=factor)


def _experts(config: HFConfig) -> MoEConfig:
    config.refuse_other("scoring_func", "sqrtsoftplus", "sigmoid")
    num_shared, width = config.get("n_shared_experts", 1), config.integer("moe_intermediate_size")
    config.refuse_if(num_shared != 1, f"has {num_shared} shared experts")
    config.refuse_if(config.integer("num_experts_per_tok") == 1, "renormalises the score of a single expert")
    config.refuse_if(not config.get("norm_topk_prob", True), "does not renormalise scores (norm_topk_prob)")
    activation = replace(read_activation(config), clamp=float(config.get("swiglu_limit", 10.0)))
    shared = MLPConfig(hidden_size=config.integer("hidden_size"), ffn_hidden_size=width, activation=activation)
    scaling_factor = float(config.get("routed_scaling_factor", 1.0))
    return read_moe(
        config,
        config.integer("n_routed_experts"),
        width,
        activation=activation,
        shared=SharedExpertsConfig(mlp=shared),
        score_function=config.get("scoring_func", "sqrtsoftplus"),
        expert_bias=True,
        scaling_factor=None if scaling_factor == 1.0 else scaling_factor,
        dtype="fp32",
    )
