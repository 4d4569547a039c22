"""DeepSeek-V2 and V3 (also Moonlight and Kimi-K2): multi-latent attention and the group-limited router."""

from typing import Any

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_layers,
    read_mlp,
    read_moe,
    read_norm,
    read_rope,
)
from megatron_moe.config.attention import CoreAttentionConfig, MLAConfig, NormConfig, yarn_mscale
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig, SharedExpertsConfig

_LATENT_NORM_EPS = 1e-6
"""transformers uses the default epsilon for the q and kv latent norms and ignores rms_norm_eps there."""


def deepseek_v2(config: HFConfig) -> tuple[LayerConfig, ...]:
    """DeepSeek-V2 (arXiv 2405.04434): softmax over all experts, scaled but not renormalised."""
    config.refuse_if(config.get("norm_topk_prob", False), "renormalises softmax probabilities (norm_topk_prob)")
    config.refuse_other("scoring_func", "softmax")
    config.refuse_other("topk_method", "greedy", "group_limited_greedy")
    topk, group_topk = config.integer("num_experts_per_tok"), config.get("topk_group", 1)
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy" and config.get("n_group", 1) > 1
    config.refuse_if(
        grouped and topk // group_topk != 1, f"scores groups by their best expert at top-{topk} in {group_topk} groups"
    )
    return _layers(config, _moe(config, grouped, pre_softmax=True), interleaved=True)


def deepseek_v3(config: HFConfig) -> tuple[LayerConfig, ...]:
    """DeepSeek-V3 (arXiv 2412.19437)."""
    config.refuse_other("scoring_func", "sigmoid")
    config.refuse_other("topk_method", "noaux_tc")
    return _layers(config, read_sigmoid_moe(config), interleaved=config.get("rope_interleave", True))


def read_sigmoid_moe(config: HFConfig) -> MoEConfig:
    """Reads the MoE layer of DeepSeek-V3: sigmoid scores, expert bias, expert groups, shared experts.

    Refuses two cases that transformers computes differently: it renormalises the score of a single expert, and it
    scores a group by its best two experts, where our router uses the best topk // group_topk.
    """
    topk, renormalised = config.integer("num_experts_per_tok"), config.get("norm_topk_prob", True)
    config.refuse_if(topk == 1 and renormalised, "renormalises the score of a single expert (norm_topk_prob)")
    config.refuse_if(topk > 1 and not renormalised, "does not renormalise sigmoid scores (norm_topk_prob false)")
    num_groups, group_topk = config.get("n_group", 1), config.get("topk_group", 1)
    config.refuse_if(
        num_groups > 1 and topk // group_topk != 2,
        f"scores groups by their best 2 experts at top-{topk} in {group_topk} groups",
    )
    return _moe(config, num_groups > 1, score_function="sigmoid", expert_bias=True)


def _moe(config: HFConfig, grouped: bool, **router: Any) -> MoEConfig:
    """Shared experts are one MLP of their total width."""
    ffn_hidden_size, num_shared = config.integer("moe_intermediate_size"), config.get("n_shared_experts", 0)
    scaling_factor = float(config.get("routed_scaling_factor", 1.0))
    return read_moe(
        config,
        config.integer("n_routed_experts"),
        ffn_hidden_size,
        shared=SharedExpertsConfig(mlp=read_mlp(config, num_shared * ffn_hidden_size)) if num_shared else None,
        num_groups=config.get("n_group", 1) if grouped else None,
        group_topk=config.get("topk_group", 1) if grouped else None,
        scaling_factor=None if scaling_factor == 1.0 else scaling_factor,
        dtype="fp32",
        **router,
    )


def _layers(config: HFConfig, moe: MoEConfig, interleaved: bool) -> tuple[LayerConfig, ...]:
    """After `first_k_dense_replace` dense layers, those whose index `moe_layer_freq` divides are MoE."""
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
