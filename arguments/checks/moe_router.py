"""Rules about how tokens choose experts."""

from arguments.checks.violation import Violation, divisors
from megatron_moe.config.exit_codes import counted

_ALONE = ("none", "sinkhorn", "quantile_balancing", "expert_choice")


def enough_experts_to_choose(num_experts: int | None, moe_router_topk: int) -> Violation:
    """A token visits different experts."""
    if not num_experts or moe_router_topk <= num_experts:
        return None
    return (
        f"a token cannot visit {moe_router_topk} of {counted(num_experts, 'expert')}",
        f"--moe-router-topk {num_experts} or less",
    )


def groups_share_the_experts(num_experts: int | None, moe_router_num_groups: int | None) -> Violation:
    """Groups of experts are equally large."""
    if not num_experts or not moe_router_num_groups or num_experts % moe_router_num_groups == 0:
        return None
    return (
        f"{moe_router_num_groups} groups do not divide {num_experts} experts",
        f"use --moe-router-num-groups {divisors(num_experts)}",
    )


def group_limit_is_complete(moe_router_num_groups: int | None, moe_router_group_topk: int | None) -> Violation:
    """Group-limited routing needs to know how many groups there are and how many a token may use."""
    if moe_router_group_topk and not moe_router_num_groups:
        return "a token may use some groups, but there are none", "give --moe-router-num-groups"
    if moe_router_group_topk and moe_router_num_groups and moe_router_group_topk > moe_router_num_groups:
        return (
            f"a token cannot use {moe_router_group_topk} of {counted(moe_router_num_groups, 'group')}",
            f"--moe-router-group-topk {moe_router_num_groups} or less",
        )
    return None


def group_limit_leaves_enough_experts(
    num_experts: int | None,
    moe_router_topk: int,
    moe_router_num_groups: int | None,
    moe_router_group_topk: int | None,
) -> Violation:
    """The groups of a token hold all experts it visits, and every one of them is scored by at least one expert."""
    if not num_experts or not moe_router_num_groups or not moe_router_group_topk:
        return None
    if moe_router_topk < moe_router_group_topk:
        return (
            f"top-{moe_router_topk} cannot be spread over {moe_router_group_topk} groups",
            f"--moe-router-group-topk {moe_router_topk} or less",
        )
    held = moe_router_group_topk * (num_experts // moe_router_num_groups)
    if held < moe_router_topk:
        return (
            f"{moe_router_group_topk} of {moe_router_num_groups} groups: {counted(held, 'expert')}, fewer than top-"
            f"{moe_router_topk} needs",
            "use larger groups, or more of them",
        )
    return None


def bias_needs_independent_scores(
    num_experts: int | None, moe_router_enable_expert_bias: bool, moe_router_score_function: str
) -> Violation:
    """A bias on the choice is only meaningful where the score of an expert does not depend on the others."""
    if not num_experts or not moe_router_enable_expert_bias or moe_router_score_function != "softmax":
        return None
    return "an expert bias does not go with softmax scores", "--moe-router-score-function sigmoid"


def one_choice_needs_pre_softmax(
    num_experts: int | None,
    moe_router_topk: int,
    moe_router_score_function: str,
    moe_router_pre_softmax: bool,
    moe_router_load_balancing_type: tuple[str, ...],
    skip_train: bool,
) -> Violation:
    """The softmax over a single chosen expert is 1 whatever its logit, so training would not change the router."""
    if skip_train or not num_experts or moe_router_topk != 1 or moe_router_pre_softmax:
        return None
    if moe_router_score_function != "softmax" or {"sinkhorn", "expert_choice"} & set(moe_router_load_balancing_type):
        return None
    return "top-1 with softmax after the choice gives the router no gradient", "--moe-router-pre-softmax"


def one_coefficient_per_loss(
    moe_router_load_balancing_type: tuple[str, ...], moe_aux_loss_coeff: tuple[float, ...]
) -> Violation:
    """Every balancing loss has a weight of its own, in the same order."""
    if len(moe_router_load_balancing_type) == len(moe_aux_loss_coeff):
        return None
    return (
        f"{counted(len(moe_router_load_balancing_type), 'kind')} of balancing, but "
        f"{counted(len(moe_aux_loss_coeff), 'coefficient')}",
        "give as many values to --moe-aux-loss-coeff as to --moe-router-load-balancing-type",
    )


def balancing_kinds_go_together(moe_router_load_balancing_type: tuple[str, ...]) -> Violation:
    """Only losses can be added up; other ways of balancing replace the choice itself."""
    kinds = moe_router_load_balancing_type
    if not kinds:
        return "no kind of balancing is given", "--moe-router-load-balancing-type none"
    if len(set(kinds)) < len(kinds):
        return f"a kind of balancing is given twice: {' '.join(kinds)}", "give each kind once"
    alone = [kind for kind in kinds if kind in _ALONE]
    if alone and len(kinds) > 1:
        return f"{alone[0]} goes with no other balancing: {' '.join(kinds)}", "keep the losses, or it alone"
    return None


def own_choices_have_no_loss(
    num_experts: int | None,
    moe_router_load_balancing_type: tuple[str, ...],
    moe_aux_loss_coeff: tuple[float, ...],
    moe_router_enable_expert_bias: bool,
    moe_router_group_topk: int | None,
    moe_router_topk_scaling_factor: float | None,
) -> Violation:
    """A choice that balances by itself takes no loss, no bias and no groups."""
    kinds = [kind for kind in moe_router_load_balancing_type if kind in _ALONE and kind != "none"]
    if not num_experts or not kinds:
        return None
    if any(moe_aux_loss_coeff) or moe_router_enable_expert_bias or moe_router_group_topk:
        return (
            f"{kinds[0]} goes with no balancing loss, expert bias or groups",
            "--moe-aux-loss-coeff 0, no bias or groups",
        )
    if kinds[0] == "sinkhorn" and moe_router_topk_scaling_factor:
        return "sinkhorn has no scaling factor", "leave out --moe-router-topk-scaling-factor"
    return None


def quantiles_need_a_rest(
    num_experts: int | None, moe_router_topk: int, moe_router_load_balancing_type: tuple[str, ...]
) -> Violation:
    """A threshold lies between experts that are chosen and experts that are not."""
    if "quantile_balancing" not in moe_router_load_balancing_type or num_experts != moe_router_topk:
        return None
    return (
        f"--moe-router-topk {moe_router_topk} of {num_experts} chooses every expert",
        "use a smaller --moe-router-topk",
    )


RULES = (
    enough_experts_to_choose,
    groups_share_the_experts,
    group_limit_is_complete,
    group_limit_leaves_enough_experts,
    bias_needs_independent_scores,
    one_choice_needs_pre_softmax,
    one_coefficient_per_loss,
    balancing_kinds_go_together,
    own_choices_have_no_loss,
    quantiles_need_a_rest,
)
