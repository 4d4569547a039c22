"""Rules about layers with experts: where they are, what they are made of, how they come from a dense model."""

from arguments import derive
from arguments.checks.violation import (
    Violation,
    divisors,
    unfit_pattern,
)
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_KINDS_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "expert_choice", "none")


def expert_layers_fit(num_layers: int, num_experts: int | None, moe_layer_freq: LayerPattern) -> Violation:
    """The pattern says which layers have experts, one entry per layer."""
    return unfit_pattern("--moe-layer-freq", moe_layer_freq, num_layers) if num_experts else None


def shared_experts_have_no_bias(
    num_experts: int | None, moe_shared_expert_intermediate_size: int | None, add_bias_linear: bool
) -> Violation:
    """Shared experts exist without biases only."""
    if num_experts and moe_shared_expert_intermediate_size and add_bias_linear:
        return "shared experts cannot have biases", "--disable-bias-linear"
    return None


def gate_needs_shared_experts(
    num_experts: int | None, moe_shared_expert_gate: bool, moe_shared_expert_intermediate_size: int | None
) -> Violation:
    """The gate weighs the shared experts' output."""
    if num_experts and moe_shared_expert_gate and not moe_shared_expert_intermediate_size:
        return "there are no shared experts to gate", "give --moe-shared-expert-intermediate-size"
    return None


def capacity_is_positive(moe_expert_capacity_factor: float | None) -> Violation:
    """An expert with a capacity of 0 takes no token at all."""
    if moe_expert_capacity_factor != 0:
        return None
    return "a capacity factor of 0 drops every token", "use a factor around 1, or leave it out to drop none"


def padding_needs_a_capacity(
    moe_pad_expert_input_to_capacity: bool, moe_expert_capacity_factor: float | None
) -> Violation:
    """Experts are padded to their capacity."""
    if moe_pad_expert_input_to_capacity and (moe_expert_capacity_factor is None or moe_expert_capacity_factor < 0):
        return "experts are padded to a capacity that is not given", "give --moe-expert-capacity-factor"
    return None


def capacity_fits_the_balancing(
    moe_expert_capacity_factor: float | None, moe_router_load_balancing_type: tuple[str, ...]
) -> Violation:
    """Ways of choosing that balance by themselves leave no token to drop."""
    strange = set(moe_router_load_balancing_type).difference(_KINDS_WITH_CAPACITY)
    if moe_expert_capacity_factor is None or moe_expert_capacity_factor < 0 or not strange:
        return None
    return (
        f"{', '.join(sorted(strange))} goes with no capacity",
        "leave out --moe-expert-capacity-factor, or balance with aux_loss",
    )


def weights_on_input_need_one_choice(moe_apply_probs_on_input: bool, moe_router_topk: int) -> Violation:
    """The input of an expert can carry one weight per token, not one per choice."""
    if moe_apply_probs_on_input and moe_router_topk != 1:
        return f"top-{moe_router_topk} has several weights per token", "--moe-router-topk 1"
    return None


def weights_have_one_place(moe_apply_probs_on_input: bool, moe_memory_efficient_permutation: bool) -> Violation:
    """Weights on the input do not come after the second matrix as well."""
    if moe_apply_probs_on_input and not moe_memory_efficient_permutation:
        return (
            "--moe-apply-probs-on-input with --no-moe-memory-efficient-permutation: one weighs the rows before an "
            "expert, the other behind it",
            "leave out one of them",
        )
    return None


def upcycling_needs_a_dense_checkpoint(
    moe_use_upcycling: bool, num_experts: int | None, load: str | None, save: str | None, run_dir: str | None
) -> Violation:
    """Upcycling reads a dense model, turns it into experts, and saves the result."""
    if not moe_use_upcycling:
        return None
    if not num_experts:
        return "upcycling makes experts, but the model has none", "give --num-experts"
    if not load:
        return "upcycling needs a dense checkpoint", "give --load"
    if not save and not run_dir:
        return "upcycling saves the new model, but there is no folder for it", "give --save or --run-dir"
    return None


def slices_make_the_dense_width(
    moe_use_upcycling: bool,
    moe_upcycling_granularity: int,
    moe_ffn_hidden_size: int | None,
    ffn_hidden_size: int | None,
    hidden_size: int,
    swiglu: bool,
    moe_latent_size: int | None,
) -> Violation:
    """Every dense feed-forward block is cut into as many slices as the granularity says, each an expert."""
    if not moe_use_upcycling:
        return None
    if moe_latent_size:
        return "a dense model has no latent space to take experts from", "leave out --moe-latent-size"
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


def slices_make_whole_groups(
    moe_use_upcycling: bool, num_experts: int | None, moe_upcycling_granularity: int
) -> Violation:
    """The slices of one dense block form a group of experts; there are only whole groups."""
    if not moe_use_upcycling or not num_experts or num_experts % moe_upcycling_granularity == 0:
        return None
    return (
        f"--num-experts {num_experts} cannot be divided into groups of {moe_upcycling_granularity} slices",
        f"use a granularity of {divisors(num_experts)}",
    )


def expert_width_divides_among_tensor_ranks(
    num_experts: int | None,
    moe_ffn_hidden_size: int | None,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """A rank computes an equal share of the channels of its experts."""
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    if not num_experts or moe_ffn_hidden_size is None or moe_ffn_hidden_size % etp == 0:
        return None
    return (
        f"--moe-ffn-hidden-size {moe_ffn_hidden_size} cannot be divided among {etp} expert-tensor-parallel ranks",
        f"use a divisor of {moe_ffn_hidden_size} for --expert-tensor-parallel-size, for example 1",
    )


def flex_stays_on_one_rank(
    num_experts: int | None,
    moe_token_dispatcher_type: str,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """Its libraries are not used yet. Where one rank has all experts nothing travels: all dispatchers are the same."""
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    if not num_experts or moe_token_dispatcher_type != "flex" or expert_model_parallel_size * etp == 1:
        return None
    return (
        f"--moe-token-dispatcher-type flex over {expert_model_parallel_size} expert-parallel x "
        f"{counted(etp, 'expert-tensor-parallel rank')} is not available yet",
        "use --moe-token-dispatcher-type alltoall",
    )


def shared_experts_overlap_with_nothing_else(
    num_experts: int | None,
    moe_shared_expert_overlap: bool,
    moe_latent_size: int | None,
    overlap_moe_expert_parallel_comm: bool,
) -> Violation:
    """Shared experts can work while rows travel when rows are tokens, and when no other microbatch works then."""
    if not num_experts or not moe_shared_expert_overlap:
        return None
    if moe_latent_size:
        return (
            f"--moe-shared-expert-overlap with experts in a latent space of {moe_latent_size}",
            "leave out --moe-shared-expert-overlap",
        )
    if overlap_moe_expert_parallel_comm:
        return (
            "--moe-shared-expert-overlap and --overlap-moe-expert-parallel-comm both fill the time in which rows "
            "travel",
            "choose one of them",
        )
    return None


RULES = (
    expert_layers_fit,
    shared_experts_have_no_bias,
    gate_needs_shared_experts,
    capacity_is_positive,
    padding_needs_a_capacity,
    capacity_fits_the_balancing,
    weights_on_input_need_one_choice,
    weights_have_one_place,
    upcycling_needs_a_dense_checkpoint,
    slices_make_the_dense_width,
    slices_make_whole_groups,
    expert_width_divides_among_tensor_ranks,
    flex_stays_on_one_rank,
    shared_experts_overlap_with_nothing_else,
)
