"""Rules about MoE layers: placement, shared experts, capacity, upcycling and dispatch."""

from arguments import derive
from arguments.checks.violation import Violation, divisors, functions_returning, unfit_pattern
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_BALANCING_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "expert_choice", "none")


def moe_layer_pattern_matches_layers(
    num_layers: int, num_experts: int | None, moe_layer_freq: LayerPattern
) -> Violation:
    """The pattern has one entry per layer and selects the MoE layers."""
    return unfit_pattern("--moe-layer-freq", moe_layer_freq, num_layers) if num_experts else None


def shared_experts_have_no_bias(
    num_experts: int | None, moe_shared_expert_intermediate_size: int | None, add_bias_linear: bool
) -> Violation:
    """Shared experts do not support biases."""
    if num_experts and moe_shared_expert_intermediate_size and add_bias_linear:
        return "shared experts do not support biases", "use --disable-bias-linear"
    return None


def gate_needs_shared_experts(
    num_experts: int | None, moe_shared_expert_gate: bool, moe_shared_expert_intermediate_size: int | None
) -> Violation:
    """The gate scales the output of the shared experts."""
    if num_experts and moe_shared_expert_gate and not moe_shared_expert_intermediate_size:
        return "--moe-shared-expert-gate without shared experts", "set --moe-shared-expert-intermediate-size"
    return None


def capacity_is_positive(moe_expert_capacity_factor: float | None) -> Violation:
    """An expert with capacity 0 drops every token."""
    if moe_expert_capacity_factor != 0:
        return None
    return "a capacity factor of 0 drops every token", "use a factor around 1, or remove it to drop no tokens"


def padding_needs_capacity(
    moe_pad_expert_input_to_capacity: bool, moe_expert_capacity_factor: float | None
) -> Violation:
    """Expert inputs are padded to the expert capacity."""
    if moe_pad_expert_input_to_capacity and (moe_expert_capacity_factor is None or moe_expert_capacity_factor < 0):
        return "--moe-pad-expert-input-to-capacity without a capacity", "set --moe-expert-capacity-factor"
    return None


def capacity_supports_balancing(
    moe_expert_capacity_factor: float | None, moe_router_load_balancing_type: tuple[str, ...]
) -> Violation:
    """These routing methods balance the experts by construction and do not drop tokens."""
    unsupported = set(moe_router_load_balancing_type).difference(_BALANCING_WITH_CAPACITY)
    if moe_expert_capacity_factor is None or moe_expert_capacity_factor < 0 or not unsupported:
        return None
    return (
        f"{', '.join(sorted(unsupported))} does not support a capacity",
        "remove --moe-expert-capacity-factor, or use aux_loss",
    )


def probs_on_input_need_top1(moe_apply_probs_on_input: bool, moe_router_topk: int) -> Violation:
    """The input row of an expert can carry one probability per token."""
    if moe_apply_probs_on_input and moe_router_topk != 1:
        return f"--moe-apply-probs-on-input with top-{moe_router_topk}", "use --moe-router-topk 1"
    return None


def probs_are_applied_once(moe_apply_probs_on_input: bool, moe_memory_efficient_permutation: bool) -> Violation:
    """Probabilities are applied before the experts or after the second expert GEMM."""
    if moe_apply_probs_on_input and not moe_memory_efficient_permutation:
        return (
            "--moe-apply-probs-on-input with --no-moe-memory-efficient-permutation: one applies the probabilities "
            "before the experts, the other after them",
            "leave out one of them",
        )
    return None


def upcycling_needs_dense_checkpoint(
    moe_use_upcycling: bool, num_experts: int | None, load: str | None, save: str | None, run_dir: str | None
) -> Violation:
    """Upcycling reads a dense checkpoint, converts it to experts and saves the result."""
    if not moe_use_upcycling:
        return None
    if not num_experts:
        return "--moe-use-upcycling without experts", "set --num-experts"
    if not load:
        return "--moe-use-upcycling without a dense checkpoint", "set --load"
    if not save and not run_dir:
        return "--moe-use-upcycling without a directory for the new checkpoint", "set --save or --run-dir"
    return None


def upcycled_slices_make_dense_width(
    moe_use_upcycling: bool,
    moe_upcycling_granularity: int,
    moe_ffn_hidden_size: int | None,
    ffn_hidden_size: int | None,
    hidden_size: int,
    swiglu: bool,
    moe_latent_size: int | None,
) -> Violation:
    """Upcycling cuts every dense feed-forward block into --moe-upcycling-granularity slices, one per expert."""
    if not moe_use_upcycling:
        return None
    if moe_latent_size:
        return (
            "--moe-use-upcycling with --moe-latent-size: a dense model has no latent projections",
            "remove --moe-latent-size",
        )
    dense = derive.ffn_hidden_size(ffn_hidden_size, hidden_size, swiglu)
    expert = moe_ffn_hidden_size or dense
    if expert * moe_upcycling_granularity == dense:
        return None
    return (
        f"{counted(moe_upcycling_granularity, 'slice')} of width {expert}, but the dense width is {dense}",
        f"--moe-ffn-hidden-size {dense // moe_upcycling_granularity}"
        if dense % moe_upcycling_granularity == 0
        else f"use a granularity that divides {dense}",
    )


def upcycled_slices_make_whole_groups(
    moe_use_upcycling: bool, num_experts: int | None, moe_upcycling_granularity: int
) -> Violation:
    """The slices of one dense block form a group of experts, and all groups are complete."""
    if not moe_use_upcycling or not num_experts or num_experts % moe_upcycling_granularity == 0:
        return None
    return (
        f"--num-experts {num_experts} cannot be divided into groups of {moe_upcycling_granularity} slices",
        f"use a granularity of {divisors(num_experts)}",
    )


def etp_divides_expert_width(
    num_experts: int | None,
    moe_ffn_hidden_size: int | None,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """Every expert-tensor-parallel rank computes an equal share of the expert channels."""
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    if not num_experts or moe_ffn_hidden_size is None or moe_ffn_hidden_size % etp == 0:
        return None
    return (
        f"--moe-ffn-hidden-size {moe_ffn_hidden_size} cannot be divided among {etp} expert-tensor-parallel ranks",
        f"use a divisor of {moe_ffn_hidden_size} for --expert-tensor-parallel-size, for example 1",
    )


def shared_expert_overlap_is_supported(
    num_experts: int | None,
    moe_shared_expert_overlap: bool,
    moe_latent_size: int | None,
    overlap_moe_expert_parallel_comm: bool,
) -> Violation:
    """Shared experts overlap with the token exchange only if the exchanged rows are hidden states and no other
    microbatch overlaps it."""
    if not num_experts or not moe_shared_expert_overlap:
        return None
    if moe_latent_size:
        return (
            f"--moe-shared-expert-overlap with experts in a latent space of {moe_latent_size}",
            "leave out --moe-shared-expert-overlap",
        )
    if overlap_moe_expert_parallel_comm:
        return (
            "--moe-shared-expert-overlap and --overlap-moe-expert-parallel-comm both overlap with the exchange of rows",
            "choose one of them",
        )
    return None


RULES = functions_returning(Violation, globals())
