"""Rules about routing and load balancing."""

import os

from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks
from megatron_moe.config.functions import ScoreFunction
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS
from megatron_moe.config.text import counted, divisors


def forced_routing_of_data_is_requested(flags: RuleFlags) -> Violations:
    """With forced routing, the model does not learn to route. Config files must therefore not enable it in runs that
    train on data."""
    if flags.forced_routing_of_files and not flags.mock_data and (flags.data_path or flags.train_data_path):
        option = flags.forced_routing_of_files
        off = ", or add --no-moe-router-force-load-balancing," if option.endswith("balancing") else ""
        remedy = f"remove it there{off} to train the router; repeat it on the command line to keep it"
        yield f"a file sets {option}, which replaces the router by random logits, but this run trains on data", remedy


def topk_is_at_most_experts(flags: RuleFlags) -> Violations:
    """The experts of a token are distinct, so top-k is at most the number of experts."""
    if flags.num_experts and flags.moe_router_topk > flags.num_experts:
        remedy = f"--moe-router-topk {flags.num_experts} or less"
        yield f"--moe-router-topk {flags.moe_router_topk} exceeds {counted(flags.num_experts, 'expert')}", remedy


def hash_layers_are_layers_of_the_decoder(flags: RuleFlags) -> Violations:
    """Hash layers are the first layers of the decoder. The multi-token prediction layer has the config of the last
    decoder layer, which must route by scores. Balancing methods that replace the selection would replace the hash."""
    number, most = flags.moe_n_hash_layers, flags.num_layers - bool(flags.mtp_num_layers)
    if number > most:
        remedy = f"--moe-n-hash-layers {most} or less"
        yield f"--moe-n-hash-layers {number} exceeds the {counted(most, 'layer')} that may route by token id", remedy
    methods = [name for name in flags.moe_router_load_balancing_type if BALANCING.get(name).replaces_topk]
    if number and methods:
        yield conflict(
            f"--moe-n-hash-layers {number}",
            f"--moe-router-load-balancing-type {methods[0]}, which replaces the selection in all layers",
            "leave out one of them",
        )


def router_groups_divide_experts(flags: RuleFlags) -> Violations:
    """All groups of experts have the same size."""
    if flags.num_experts and flags.moe_router_num_groups and flags.num_experts % flags.moe_router_num_groups:
        remedy = f"use --moe-router-num-groups {divisors(flags.num_experts, flags.moe_router_num_groups)}"
        yield f"{flags.moe_router_num_groups} groups do not divide {flags.num_experts} experts", remedy


def group_limit_is_complete(flags: RuleFlags) -> Violations:
    """Group-limited routing selects --moe-router-group-topk of --moe-router-num-groups groups per token, so the number
    of groups must be set and at least as large."""
    if flags.moe_router_group_topk and not flags.moe_router_num_groups:
        yield lacks("--moe-router-group-topk", "groups", "set --moe-router-num-groups")
    elif (
        flags.moe_router_group_topk
        and flags.moe_router_num_groups
        and flags.moe_router_group_topk > flags.moe_router_num_groups
    ):
        yield (
            f"--moe-router-group-topk {flags.moe_router_group_topk} exceeds "
            f"{counted(flags.moe_router_num_groups, 'group')}",
            f"--moe-router-group-topk {flags.moe_router_num_groups} or less",
        )


def group_limit_leaves_enough_experts(flags: RuleFlags) -> Violations:
    """The selected groups must contain at least top-k experts, and at most top-k groups can be selected."""
    if not flags.num_experts or not flags.moe_router_num_groups or not flags.moe_router_group_topk:
        return
    if flags.moe_router_topk < flags.moe_router_group_topk:
        remedy = f"--moe-router-group-topk {flags.moe_router_topk} or less"
        yield f"top-{flags.moe_router_topk} cannot be spread over {flags.moe_router_group_topk} groups", remedy
    reachable = flags.moe_router_group_topk * (flags.num_experts // flags.moe_router_num_groups)
    if reachable < flags.moe_router_topk:
        yield (
            f"{flags.moe_router_group_topk} of {flags.moe_router_num_groups} groups contain "
            f"{counted(reachable, 'expert')}, fewer than top-{flags.moe_router_topk} needs",
            "use larger groups, or more of them",
        )


def expert_bias_needs_independent_scores(flags: RuleFlags) -> Violations:
    """An expert bias needs scores that do not depend on other experts; a softmax score depends on all experts."""
    if flags.num_experts and flags.moe_router_enable_expert_bias and _scores(flags).over_experts:
        remedy = "use --moe-router-score-function sigmoid"
        yield f"--moe-router-enable-expert-bias does not support {flags.moe_router_score_function} scores", remedy


def top1_needs_pre_softmax(flags: RuleFlags) -> Violations:
    """The softmax over one selected expert is always 1, so the router would have no gradient."""
    if flags.skip_train or not flags.num_experts or flags.moe_router_topk != 1 or flags.moe_router_pre_softmax:
        return
    if _scores(flags).over_experts and not {"sinkhorn", "expert_choice"} & set(flags.moe_router_load_balancing_type):
        kind = flags.moe_router_score_function
        yield f"top-1 with {kind} after the selection gives the router no gradient", "use --moe-router-pre-softmax"


def _scores(flags: RuleFlags) -> ScoreFunction:
    entry: ScoreFunction = SCORE_FUNCTIONS.get(flags.moe_router_score_function)
    return entry


def one_coefficient_per_balancing_type(flags: RuleFlags) -> Violations:
    """Every balancing type needs a coefficient; types and coefficients are given in the same order."""
    if len(flags.moe_router_load_balancing_type) != len(flags.moe_aux_loss_coeff):
        yield (
            f"{counted(len(flags.moe_router_load_balancing_type), 'balancing type')}, but "
            f"{counted(len(flags.moe_aux_loss_coeff), 'coefficient')}",
            "give as many values to --moe-aux-loss-coeff as to --moe-router-load-balancing-type",
        )


def balancing_types_combine(flags: RuleFlags) -> Violations:
    """Only auxiliary losses can be combined; other balancing types replace the expert selection."""
    kinds = flags.moe_router_load_balancing_type
    if not kinds:
        yield "no balancing type is given", "use --moe-router-load-balancing-type none"
    elif len(set(kinds)) < len(kinds):
        yield f"a balancing type is given twice: {' '.join(kinds)}", "give each type once"
    exclusive = [kind for kind in kinds if BALANCING.get(kind).function is None]
    if exclusive and len(kinds) > 1:
        remedy = f"use the losses, or {exclusive[0]} alone"
        yield conflict(exclusive[0], f"other balancing types: {' '.join(kinds)}", remedy)


def balanced_selection_has_no_loss(flags: RuleFlags) -> Violations:
    """Balanced selection methods support no auxiliary loss, expert bias or groups."""
    kinds = [kind for kind in flags.moe_router_load_balancing_type if BALANCING.get(kind).replaces_topk]
    if not flags.num_experts or not kinds:
        return
    if any(flags.moe_aux_loss_coeff) or flags.moe_router_enable_expert_bias or flags.moe_router_group_topk:
        remedy = "use --moe-aux-loss-coeff 0 without bias or groups"
        yield f"{kinds[0]} does not support a balancing loss, expert bias or groups", remedy
    elif kinds[0] == "sinkhorn" and flags.moe_router_topk_scaling_factor:
        yield "sinkhorn does not support a scaling factor", "remove --moe-router-topk-scaling-factor"


def quantile_balancing_needs_more_experts_than_topk(flags: RuleFlags) -> Violations:
    """Quantile balancing uses the (k + 1)-th largest score of a token, so there must be more than k experts."""
    if "quantile_balancing" in flags.moe_router_load_balancing_type and flags.num_experts == flags.moe_router_topk:
        remedy = "use a smaller --moe-router-topk"
        yield f"--moe-router-topk {flags.moe_router_topk} of {flags.num_experts} selects every expert", remedy


def forced_skew_is_possible(flags: RuleFlags) -> Violations:
    """A token selects an expert at most once, so the load of the busiest expert is below experts / top-k of the mean.
    Only one flag can determine the random logits."""
    skew = flags.moe_router_force_skew
    if not flags.num_experts or skew is None:
        return
    if skew * flags.moe_router_topk >= flags.num_experts:
        limit = flags.num_experts / flags.moe_router_topk
        yield (
            f"--moe-router-force-skew {skew:g} is not below {flags.num_experts} experts / top-{flags.moe_router_topk} "
            f"= {limit:g}, the load of an expert that every token selects",
            f"use 1 or more, and less than {limit:g}",
        )
    if flags.moe_router_force_biased is not None:
        yield conflict("--moe-router-force-skew", "--moe-router-force-biased")


def traced_routing_is_per_token(flags: RuleFlags) -> Violations:
    """Routing traces contain the experts that every token selects, but with expert choice the experts select tokens."""
    paths = {
        "--moe-routing-trace-path": flags.moe_routing_trace_path is not None,
        "--moe-routing-replay-path": flags.moe_routing_replay_path is not None,
    }
    if flags.num_experts and any(paths.values()) and "expert_choice" in flags.moe_router_load_balancing_type:
        remedy = "use another load balancing"
        yield conflict(enabled_options(paths), "--moe-router-load-balancing-type expert_choice", remedy)


def trace_and_replay_have_their_own_folders(flags: RuleFlags) -> Violations:
    """If both folders were the same, a run would overwrite the trace that it replays."""
    trace, replay = flags.moe_routing_trace_path, flags.moe_routing_replay_path
    if trace is not None and replay is not None and os.path.realpath(trace) == os.path.realpath(replay):
        remedy = "write the trace to another folder"
        yield f"--moe-routing-trace-path {trace} and --moe-routing-replay-path {replay} are the same folder", remedy


def replayed_tokens_are_whole(flags: RuleFlags) -> Violations:
    """The tokens of a context-parallel rank are not contiguous, so a trace cannot be distributed over context-parallel
    ranks."""
    if flags.moe_routing_replay_path is not None and flags.context_parallel_size > 1:
        remedy = "use --context-parallel-size 1"
        yield conflict("--moe-routing-replay-path", f"--context-parallel-size {flags.context_parallel_size}", remedy)
