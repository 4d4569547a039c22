"""Families with multi-latent attention: DeepSeek-V2 and V3; Moonlight and Kimi-K2 are V3 in form."""

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_mlp,
    read_norm,
    read_rope,
)
from megatron_moe.checkpoint.huggingface.sigmoid_router import (
    read_experts,
    read_shared,
    read_sigmoid_moe,
    scaling_factor,
)
from megatron_moe.config.attention import (
    CoreAttentionConfig,
    MLAConfig,
    NormConfig,
    RopeConfig,
    yarn_mscale,
)
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig, RouterConfig

_LATENT_NORM_EPS = 1e-6
"""Hugging Face norms the compressed q and kv with the default epsilon, whatever rms_norm_eps says."""


def deepseek_v2(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2405.04434. Softmax over all experts, not renormalised, times a scaling factor."""
    config.refuse_if(config.get("norm_topk_prob", False), "renormalises softmax probabilities (norm_topk_prob)")
    config.refuse_other("scoring_func", "softmax")
    config.refuse_other("topk_method", "greedy", "group_limited_greedy")
    return _layers(config, _softmax_moe(config), interleaved=True)


def deepseek_v3(config: HFConfig) -> tuple[LayerConfig, ...]:
    """arXiv 2412.19437."""
    config.refuse_other("scoring_func", "sigmoid")
    config.refuse_other("topk_method", "noaux_tc")
    return _layers(config, read_sigmoid_moe(config), interleaved=config.get("rope_interleave", True))


def _layers(config: HFConfig, moe: MoEConfig, interleaved: bool) -> tuple[LayerConfig, ...]:
    """From the layer `first_k_dense_replace` on, every one whose index `moe_layer_freq` divides is MoE."""
    norm, mixer = read_norm(config, 1e-6), _mla(config, interleaved)
    dense, num_dense = read_mlp(config, config.integer("intermediate_size")), config.get("first_k_dense_replace", 0)
    step = config.get("moe_layer_freq", 1)
    return tuple(
        LayerConfig(mixer=mixer, feed_forward=moe if index >= num_dense and index % step == 0 else dense, norm=norm)
        for index in range(config.integer("num_hidden_layers"))
    )


def _mla(config: HFConfig, interleaved: bool) -> MLAConfig:
    config.refuse_if(config.get("attention_bias", False), "has biases in its attention (attention_bias)")
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    rope = read_rope(config, rope_dim, 10000.0, interleaved)
    core = CoreAttentionConfig(
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * _yarn_gain(rope) ** 2,
        dropout=float(config.get("attention_dropout", 0.0)),
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


def _yarn_gain(rope: RopeConfig) -> float:
    """m of the softmax scale m^2 / sqrt(q_head_dim)."""
    return yarn_mscale(rope.scaling_factor, rope.mscale_all_dim) if rope.scaling == "yarn" else 1.0


def _softmax_moe(config: HFConfig) -> MoEConfig:
    topk = config.integer("num_experts_per_tok")
    num_groups, group_topk = config.get("n_group", 1), config.get("topk_group", 1)
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy" and num_groups > 1
    config.refuse_if(
        grouped and topk // group_topk != 1, f"scores groups by their best expert at top-{topk} in {group_topk} groups"
    )
    router = RouterConfig(
        hidden_size=config.integer("hidden_size"),
        num_experts=config.integer("n_routed_experts"),
        topk=topk,
        pre_softmax=True,
        num_groups=num_groups if grouped else None,
        group_topk=group_topk if grouped else None,
        scaling_factor=scaling_factor(config),
        dtype="fp32",
    )
    return MoEConfig(router=router, experts=read_experts(config), shared=read_shared(config))
