"""The MoE layer of DeepSeek-V3 and its followers: sigmoid scores, expert bias, groups, shared experts."""

from megatron_moe.checkpoint.huggingface.config_reader import (
    HFConfig,
    read_activation,
    read_mlp,
)
from megatron_moe.config.moe import (
    ExpertsConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
)


def read_sigmoid_moe(config: HFConfig) -> MoEConfig:
    """Scores are renormalised over the chosen experts here if there are several, and a group is scored by the sum of
    its best topk // group_topk experts, where Hugging Face renormalises even a single one and sums the best two."""
    topk = config.integer("num_experts_per_tok")
    config.refuse_if(
        topk == 1 and config.get("norm_topk_prob", True), "renormalises the score of a single expert (norm_topk_prob)"
    )
    config.refuse_if(
        topk > 1 and not config.get("norm_topk_prob", True),
        "does not renormalise sigmoid scores (norm_topk_prob false)",
    )
    num_groups, group_topk = config.get("n_group", 1), config.get("topk_group", 1)
    config.refuse_if(
        num_groups > 1 and topk // group_topk != 2,
        f"scores groups by their best 2 experts at top-{topk} in {group_topk} groups",
    )
    router = RouterConfig(
        hidden_size=config.integer("hidden_size"),
        num_experts=config.integer("n_routed_experts"),
        topk=topk,
        score_function="sigmoid",
        num_groups=num_groups if num_groups > 1 else None,
        group_topk=group_topk if num_groups > 1 else None,
        scaling_factor=scaling_factor(config),
        expert_bias=True,
        dtype="fp32",
    )
    return MoEConfig(router=router, experts=read_experts(config), shared=read_shared(config))


def scaling_factor(config: HFConfig) -> float | None:
    factor = float(config.get("routed_scaling_factor", 1.0))
    return None if factor == 1.0 else factor


def read_experts(config: HFConfig) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=config.integer("n_routed_experts"),
        hidden_size=config.integer("hidden_size"),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        activation=read_activation(config),
    )


def read_shared(config: HFConfig) -> SharedExpertsConfig | None:
    """One MLP as wide as all shared experts together."""
    num_shared = config.get("n_shared_experts", 0)
    if not num_shared:
        return None
    return SharedExpertsConfig(mlp=read_mlp(config, num_shared * config.integer("moe_intermediate_size")))
