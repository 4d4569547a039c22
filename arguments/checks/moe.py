"""Rules about MoE layers: placement, shared experts, capacity, upcycling and dispatch."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violation, divisors, functions_returning, unfit_pattern
from megatron_moe.config.exit_codes import counted

_BALANCING_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "expert_choice", "none")


def moe_layer_pattern_matches_layers(flags: RuleFlags) -> Violation:
    """The pattern has one entry per layer and selects the MoE layers."""
    return unfit_pattern("--moe-layer-freq", flags.moe_layer_freq, flags.num_layers) if flags.num_experts else None


def shared_experts_have_no_bias(flags: RuleFlags) -> Violation:
    """Shared experts do not support biases."""
    if flags.num_experts and flags.moe_shared_expert_intermediate_size and flags.add_bias_linear:
        return "shared experts do not support biases", "use --disable-bias-linear"
    return None


def gate_needs_shared_experts(flags: RuleFlags) -> Violation:
    """The gate scales the output of the shared experts."""
    if flags.num_experts and flags.moe_shared_expert_gate and not flags.moe_shared_expert_intermediate_size:
        return "--moe-shared-expert-gate without shared experts", "set --moe-shared-expert-intermediate-size"
    return None


def capacity_is_positive(flags: RuleFlags) -> Violation:
    """An expert with capacity 0 drops every token."""
    if flags.moe_expert_capacity_factor != 0:
        return None
    return "a capacity factor of 0 drops every token", "use a factor around 1, or remove it to drop no tokens"


def padding_needs_capacity(flags: RuleFlags) -> Violation:
    """Expert inputs are padded to the expert capacity."""
    if flags.moe_pad_expert_input_to_capacity and (
        flags.moe_expert_capacity_factor is None or flags.moe_expert_capacity_factor < 0
    ):
        return "--moe-pad-expert-input-to-capacity without a capacity", "set --moe-expert-capacity-factor"
    return None


def capacity_supports_balancing(flags: RuleFlags) -> Violation:
    """These routing methods balance the experts by construction and do not drop tokens."""
    unsupported = set(flags.moe_router_load_balancing_type).difference(_BALANCING_WITH_CAPACITY)
    if flags.moe_expert_capacity_factor is None or flags.moe_expert_capacity_factor < 0 or not unsupported:
        return None
    return (
        f"{', '.join(sorted(unsupported))} does not support a capacity",
        "remove --moe-expert-capacity-factor, or use aux_loss",
    )


def probs_on_input_need_top1(flags: RuleFlags) -> Violation:
    """The input row of an expert can carry one probability per token."""
    if flags.moe_apply_probs_on_input and flags.moe_router_topk != 1:
        return f"--moe-apply-probs-on-input with top-{flags.moe_router_topk}", "use --moe-router-topk 1"
    return None


def probs_are_applied_once(flags: RuleFlags) -> Violation:
    """Probabilities are applied before the experts or after the second expert GEMM."""
    if flags.moe_apply_probs_on_input and not flags.moe_memory_efficient_permutation:
        return (
            "--moe-apply-probs-on-input with --no-moe-memory-efficient-permutation: one applies the probabilities "
            "before the experts, the other after them",
            "leave out one of them",
        )
    return None


def upcycling_needs_dense_checkpoint(flags: RuleFlags) -> Violation:
    """Upcycling reads a dense checkpoint, converts it to experts and saves the result."""
    if not flags.moe_use_upcycling:
        return None
    if not flags.num_experts:
        return "--moe-use-upcycling without experts", "set --num-experts"
    if not flags.load:
        return "--moe-use-upcycling without a dense checkpoint", "set --load"
    if not flags.save and not flags.run_dir:
        return "--moe-use-upcycling without a directory for the new checkpoint", "set --save or --run-dir"
    return None


def upcycled_slices_make_dense_width(flags: RuleFlags) -> Violation:
    """Upcycling cuts every dense feed-forward block into --moe-upcycling-granularity slices, one per expert."""
    if not flags.moe_use_upcycling:
        return None
    if flags.moe_latent_size:
        return (
            "--moe-use-upcycling with --moe-latent-size: a dense model has no latent projections",
            "remove --moe-latent-size",
        )
    dense = derive.ffn_hidden_size(flags)
    expert = flags.moe_ffn_hidden_size or dense
    if expert * flags.moe_upcycling_granularity == dense:
        return None
    return (
        f"{counted(flags.moe_upcycling_granularity, 'slice')} of width {expert}, but the dense width is {dense}",
        f"--moe-ffn-hidden-size {dense // flags.moe_upcycling_granularity}"
        if dense % flags.moe_upcycling_granularity == 0
        else f"use a granularity that divides {dense}",
    )


def upcycled_slices_make_whole_groups(flags: RuleFlags) -> Violation:
    """The slices of one dense block form a group of experts, and all groups are complete."""
    if not flags.moe_use_upcycling or not flags.num_experts or flags.num_experts % flags.moe_upcycling_granularity == 0:
        return None
    return (
        f"--num-experts {flags.num_experts} cannot be divided into groups of {flags.moe_upcycling_granularity} slices",
        f"use a granularity of {divisors(flags.num_experts)}",
    )


def etp_divides_expert_width(flags: RuleFlags) -> Violation:
    """Every expert-tensor-parallel rank computes an equal share of the expert channels."""
    etp = derive.expert_tensor_parallel_size(flags)
    if not flags.num_experts or flags.moe_ffn_hidden_size is None or flags.moe_ffn_hidden_size % etp == 0:
        return None
    return (
        f"--moe-ffn-hidden-size {flags.moe_ffn_hidden_size} cannot be divided among {etp} expert-tensor-parallel ranks",
        f"use a divisor of {flags.moe_ffn_hidden_size} for --expert-tensor-parallel-size, for example 1",
    )


def shared_expert_overlap_is_supported(flags: RuleFlags) -> Violation:
    """Shared experts overlap with the token exchange only if the exchanged rows are hidden states and no other
    microbatch overlaps it."""
    if not flags.num_experts or not flags.moe_shared_expert_overlap:
        return None
    if flags.moe_latent_size:
        return (
            f"--moe-shared-expert-overlap with experts in a latent space of {flags.moe_latent_size}",
            "leave out --moe-shared-expert-overlap",
        )
    if flags.overlap_moe_expert_parallel_comm:
        return (
            "--moe-shared-expert-overlap and --overlap-moe-expert-parallel-comm both overlap with the exchange of rows",
            "choose one of them",
        )
    return None


RULES = functions_returning(Violation, globals())
