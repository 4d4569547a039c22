"""Rules about MoE layers: placement, shared experts, capacity, upcycling and dispatch."""

from arguments import derive
from arguments.checks.violation import (
    RuleFlags,
    Violations,
    conflict,
    enabled_options,
    lacks,
    missing_feature,
    unfit_pattern,
)
from megatron_moe.config.registry import BALANCING
from megatron_moe.config.text import counted, divisors
from megatron_moe.config.transport import DEEPEP


def moe_layer_pattern_matches_layers(flags: RuleFlags) -> Violations:
    """--moe-layer-freq is an interval or a list with one entry per layer; it selects the MoE layers."""
    if flags.num_experts:
        yield from unfit_pattern("--moe-layer-freq", flags.moe_layer_freq, flags.num_layers)


def shared_experts_have_no_bias(flags: RuleFlags) -> Violations:
    """The linear layers of shared experts have no bias, as in Megatron-LM."""
    if flags.num_experts and flags.moe_shared_expert_intermediate_size and flags.add_bias_linear:
        yield "shared experts do not support biases", "use --disable-bias-linear"


def gate_needs_shared_experts(flags: RuleFlags) -> Violations:
    """--moe-shared-expert-gate scales the output of the shared experts."""
    if flags.num_experts and flags.moe_shared_expert_gate and not flags.moe_shared_expert_intermediate_size:
        yield lacks("--moe-shared-expert-gate", "shared experts", "set --moe-shared-expert-intermediate-size")


def capacity_is_positive(flags: RuleFlags) -> Violations:
    """An expert with capacity 0 drops every token."""
    if flags.moe_expert_capacity_factor == 0:
        yield "a capacity factor of 0 drops every token", "use a factor around 1, or remove it to drop no tokens"


def padding_needs_capacity(flags: RuleFlags) -> Violations:
    """Expert inputs are padded to the expert capacity, which must therefore be set."""
    if flags.moe_pad_expert_input_to_capacity and derive.capacity_factor(flags) is None:
        yield lacks("--moe-pad-expert-input-to-capacity", "a capacity", "set --moe-expert-capacity-factor")


def balancing_supports_capacity(flags: RuleFlags) -> Violations:
    """Sinkhorn and quantile balancing already balance the experts and do not support dropping tokens."""
    unsupported = {name for name in flags.moe_router_load_balancing_type if not BALANCING.get(name).allows_capacity}
    if derive.capacity_factor(flags) is not None and unsupported:
        remedy = "remove --moe-expert-capacity-factor, or use aux_loss"
        yield f"{', '.join(sorted(unsupported))} does not support a capacity", remedy


def probs_on_input_need_top1(flags: RuleFlags) -> Violations:
    """The input of a token is multiplied by one probability, so the token can have only one expert."""
    if flags.moe_apply_probs_on_input and flags.moe_router_topk != 1:
        yield conflict("--moe-apply-probs-on-input", f"top-{flags.moe_router_topk} routing", "use --moe-router-topk 1")


def probs_are_applied_once(flags: RuleFlags) -> Violations:
    """Routing probabilities are applied either to the expert inputs or to the expert outputs."""
    if flags.moe_apply_probs_on_input and not flags.moe_memory_efficient_permutation:
        yield (
            "--moe-apply-probs-on-input cannot be combined with --no-moe-memory-efficient-permutation: one applies "
            "the probabilities before the experts, the other after them",
            "leave out one of them",
        )


def upcycling_needs_dense_checkpoint(flags: RuleFlags) -> Violations:
    """Upcycling reads a dense checkpoint, converts it to experts and saves the result."""
    if not flags.moe_use_upcycling:
        return
    if not flags.num_experts:
        yield lacks("--moe-use-upcycling", "experts", "set --num-experts")
    elif not flags.load:
        yield "--moe-use-upcycling requires a dense checkpoint", "set --load"
    elif not flags.save and not flags.run_dir:
        yield "--moe-use-upcycling requires a directory for the new checkpoint", "set --save or --run-dir"


def upcycled_slices_make_dense_width(flags: RuleFlags) -> Violations:
    """Upcycling initialises every expert with one of --moe-upcycling-granularity slices of a dense MLP, so the expert
    width times the granularity must equal the dense width."""
    if not flags.moe_use_upcycling:
        return
    if flags.moe_latent_size:
        remedy = "remove --moe-latent-size"
        yield conflict("--moe-use-upcycling", "--moe-latent-size: a dense model has no latent projections", remedy)
    dense = derive.ffn_hidden_size(flags)
    expert = flags.moe_ffn_hidden_size or dense
    if expert * flags.moe_upcycling_granularity != dense:
        yield (
            f"{counted(flags.moe_upcycling_granularity, 'slice')} of width {expert}, but the dense width is {dense}",
            f"--moe-ffn-hidden-size {dense // flags.moe_upcycling_granularity}"
            if dense % flags.moe_upcycling_granularity == 0
            else f"use a granularity that divides {dense}",
        )


def upcycling_granularity_divides_experts(flags: RuleFlags) -> Violations:
    """Upcycling splits each copy of a dense MLP into --moe-upcycling-granularity experts, so this number must divide
    --num-experts."""
    if flags.moe_use_upcycling and flags.num_experts and flags.num_experts % flags.moe_upcycling_granularity:
        yield (
            f"--num-experts {flags.num_experts} cannot be divided into groups of "
            f"{flags.moe_upcycling_granularity} slices",
            f"use a granularity of {divisors(flags.num_experts, flags.moe_upcycling_granularity)}",
        )


def required_backend_serves_the_experts(flags: RuleFlags) -> Violations:
    """Another transport replaces a backend of the flex dispatcher that cannot serve the expert ranks, unless
    --moe-flex-require-backend is given."""
    if not flags.moe_flex_require_backend or not flags.num_experts or flags.moe_token_dispatcher_type != "flex":
        return
    choice = derive.expert_transport(flags, flags.ranks_per_host, flags.missing_libraries)
    if choice.replaces_request:
        remedy = "leave out --moe-flex-require-backend, or use another --moe-flex-dispatcher-backend"
        yield f"--moe-flex-require-backend, but {choice.note}", remedy


def flex_excludes_expert_choice(flags: RuleFlags) -> Violations:
    """The flex dispatcher sends the list of experts that each token has chosen. With expert choice, experts choose
    tokens, and a token can have any number of experts."""
    chosen = "expert_choice" in flags.moe_router_load_balancing_type
    if flags.num_experts and flags.moe_token_dispatcher_type == "flex" and derive.expert_ranks(flags) > 1 and chosen:
        remedy = "use --moe-token-dispatcher-type alltoall or allgather"
        yield conflict("--moe-token-dispatcher-type flex", "--moe-router-load-balancing-type expert_choice", remedy)


def rank_capacity_has_bounded_buffers(flags: RuleFlags) -> Violations:
    """--moe-expert-rank-capacity-factor bounds the rows that symmetric memory, hybridep and ncclep deliver. deepep and
    allgather deliver the tokens of all ranks."""
    if not flags.num_experts or flags.moe_expert_rank_capacity_factor is None:
        return
    factor = f"--moe-expert-rank-capacity-factor {flags.moe_expert_rank_capacity_factor:g}"
    transport = derive.expert_transport(flags, flags.ranks_per_host).transport
    if transport is DEEPEP:
        remedy = f"leave out {factor}, or use hybridep or symmetric"
        yield conflict(factor, "--moe-flex-dispatcher-backend deepep", remedy)
    elif flags.moe_token_dispatcher_type == "allgather":
        yield conflict(factor, "--moe-token-dispatcher-type allgather", f"leave out {factor}, or use flex or alltoall")


def shared_expert_overlap_is_supported(flags: RuleFlags) -> Violations:
    """Shared experts can overlap with the token exchange, unless the experts use a latent space or the exchange already
    overlaps with another microbatch."""
    if not flags.num_experts or not flags.moe_shared_expert_overlap:
        return
    if flags.moe_latent_size:
        remedy = "leave out --moe-shared-expert-overlap"
        yield conflict("--moe-shared-expert-overlap", f"experts in a latent space of {flags.moe_latent_size}", remedy)
    elif flags.overlap_moe_expert_parallel_comm:
        yield (
            "--moe-shared-expert-overlap and --overlap-moe-expert-parallel-comm both overlap with the exchange of rows",
            "choose one of them",
        )


def echo_has_clones(flags: RuleFlags) -> Violations:
    """--moe-enable-echo distributes --moe-num-echo-experts clones evenly over expert-parallel ranks. A rank holds only
    clones of experts of other ranks."""
    ranks, clones = flags.expert_model_parallel_size, flags.moe_num_echo_experts
    options = {
        "--moe-num-echo-experts": clones is not None,
        "--moe-echo-expert-dispatch-overlap": flags.moe_echo_expert_dispatch_overlap,
        "--moe-echo-recompute-expert-dispatch": flags.moe_echo_recompute_expert_dispatch,
    }
    if not flags.moe_enable_echo:
        if any(options.values()):
            yield f"{enabled_options(options)} without --moe-enable-echo has no effect", "set --moe-enable-echo"
    elif not flags.num_experts or ranks == 1:
        remedy = "leave it out, or set --num-experts and --expert-model-parallel-size"
        yield "--moe-enable-echo without experts over several ranks: there is no other rank for a clone", remedy
    elif clones is None:
        yield "--moe-enable-echo without clones", f"set --moe-num-echo-experts to a multiple of {ranks}"
    elif clones % ranks:
        remedy = f"use {-(-clones // ranks) * ranks}"
        yield f"--moe-num-echo-experts {clones} is not a multiple of --expert-model-parallel-size {ranks}", remedy
    elif clones // ranks > flags.num_experts - flags.num_experts // ranks:
        others = flags.num_experts - flags.num_experts // ranks
        yield (
            f"--moe-num-echo-experts {clones} is {clones // ranks} per rank, but other ranks have only "
            f"{counted(others, 'expert')}",
            f"use at most {others * ranks}",
        )


@missing_feature
def echo_clones_plain_experts(flags: RuleFlags) -> Violations:
    """Clones receive unquantised weights without biases, and rows that tokens have selected, over NCCL. Rows are not
    padded to a capacity, and expert activations are neither stashed, offloaded nor captured."""
    if not flags.moe_enable_echo or not flags.num_experts:
        return
    offloaded = [name for name in derive.offloaded_modules(flags) if name in ("expert_fc1", "moe_act")]
    modules = derive.captured_modules(flags, flags.ranks_per_host)
    captured = flags.cuda_graph_impl == "full_iteration" or "moe" in modules
    excluded = {
        f"--moe-token-dispatcher-type {flags.moe_token_dispatcher_type}": flags.moe_token_dispatcher_type != "alltoall",
        f"--fp8-format {flags.fp8_format}": flags.fp8_format is not None,
        f"--fp4-format {flags.fp4_format}": flags.fp4_format is not None,
        "--add-bias-linear": flags.add_bias_linear,
        "--moe-pad-expert-input-to-capacity": flags.moe_pad_expert_input_to_capacity,
        "--moe-router-load-balancing-type expert_choice": "expert_choice" in flags.moe_router_load_balancing_type,
        "--moe-paged-stash": flags.moe_paged_stash,
        f"--offload-modules {' '.join(offloaded)}": bool(offloaded) and flags.fine_grained_activation_offloading,
        f"--cuda-graph-impl {flags.cuda_graph_impl} of experts": flags.cuda_graph_impl != "none" and captured,
    }
    for option, is_given in excluded.items():
        if is_given:
            remedy = "use --moe-token-dispatcher-type alltoall" if "dispatcher" in option else "leave out one of them"
            yield conflict("--moe-enable-echo", option, remedy)
