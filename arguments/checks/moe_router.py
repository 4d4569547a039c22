"""Rules about routing and load balancing."""

from arguments.checks.violation import Violation, divisors, functions_returning
from megatron_moe.config.exit_codes import counted

_EXCLUSIVE = ("none", "sinkhorn", "quantile_balancing", "expert_choice")


def topk_is_at_most_experts(num_experts: int | None, moe_router_topk: int) -> Violation:
    """The experts of a token are distinct."""
    if not num_experts or moe_router_topk <= num_experts:
        return None
    return (
        f"--moe-router-topk {moe_router_topk} exceeds {counted(num_experts, 'expert')}",
        f"--moe-router-topk {num_experts} or less",
    )


def router_groups_divide_experts(num_experts: int | None, moe_router_num_groups: int | None) -> Violation:
    """All groups of experts have the same size."""
    if not num_experts or not moe_router_num_groups or num_experts % moe_router_num_groups == 0:
        return None
    return (
        f"{moe_router_num_groups} groups do not divide {num_experts} experts",
        f"use --moe-router-num-groups {divisors(num_experts)}",
    )


def group_limit_is_complete(moe_router_num_groups: int | None, moe_router_group_topk: int | None) -> Violation:
    """Group-limited routing needs the number of groups and the number of groups per token."""
    if moe_router_group_topk and not moe_router_num_groups:
        return "--moe-router-group-topk without groups", "set --moe-router-num-groups"
    if moe_router_group_topk and moe_router_num_groups and moe_router_group_topk > moe_router_num_groups:
        return (
            f"--moe-router-group-topk {moe_router_group_topk} exceeds {counted(moe_router_num_groups, 'group')}",
            f"--moe-router-group-topk {moe_router_num_groups} or less",
        )
    return None


def group_limit_leaves_enough_experts(
    num_experts: int | None, moe_router_topk: int, moe_router_num_groups: int | None, moe_router_group_topk: int | None
) -> Violation:
    """The selected groups hold at least top-k experts, and each group is scored by at least one of them."""
    if not num_experts or not moe_router_num_groups or not moe_router_group_topk:
        return None
    if moe_router_topk < moe_router_group_topk:
        return (
            f"top-{moe_router_topk} cannot be spread over {moe_router_group_topk} groups",
            f"--moe-router-group-topk {moe_router_topk} or less",
        )
    reachable = moe_router_group_topk * (num_experts // moe_router_num_groups)
    if reachable < moe_router_topk:
        return (
            f"{moe_router_group_topk} of {moe_router_num_groups} groups: {counted(reachable, 'expert')}, fewer than "
            f"top-{moe_router_topk} needs",
            "use larger groups, or more of them",
        )
    return None


def expert_bias_needs_independent_scores(
    num_experts: int | None, moe_router_enable_expert_bias: bool, moe_router_score_function: str
) -> Violation:
    """An expert bias requires scores that are independent of the other experts."""
    if not num_experts or not moe_router_enable_expert_bias or moe_router_score_function != "softmax":
        return None
    return "--moe-router-enable-expert-bias does not support softmax scores", "use --moe-router-score-function sigmoid"


def top1_needs_pre_softmax(
    num_experts: int | None,
    moe_router_topk: int,
    moe_router_score_function: str,
    moe_router_pre_softmax: bool,
    moe_router_load_balancing_type: tuple[str, ...],
    skip_train: bool,
) -> Violation:
    """The softmax over a single selected expert is always 1, so the router would have no gradient."""
    if skip_train or not num_experts or moe_router_topk != 1 or moe_router_pre_softmax:
        return None
    if moe_router_score_function != "softmax" or {"sinkhorn", "expert_choice"} & set(moe_router_load_balancing_type):
        return None
    return "top-1 with softmax after the selection gives the router no gradient", "use --moe-router-pre-softmax"


def one_coefficient_per_balancing_type(
    moe_router_load_balancing_type: tuple[str, ...], moe_aux_loss_coeff: tuple[float, ...]
) -> Violation:
    """Every balancing type has a coefficient, in the same order."""
    if len(moe_router_load_balancing_type) == len(moe_aux_loss_coeff):
        return None
    return (
        f"{counted(len(moe_router_load_balancing_type), 'balancing type')}, but "
        f"{counted(len(moe_aux_loss_coeff), 'coefficient')}",
        "give as many values to --moe-aux-loss-coeff as to --moe-router-load-balancing-type",
    )


def balancing_types_combine(moe_router_load_balancing_type: tuple[str, ...]) -> Violation:
    """Only auxiliary losses can be combined; other balancing types replace the expert selection."""
    kinds = moe_router_load_balancing_type
    if not kinds:
        return "no balancing type is given", "use --moe-router-load-balancing-type none"
    if len(set(kinds)) < len(kinds):
        return f"a balancing type is given twice: {' '.join(kinds)}", "give each type once"
    exclusive = [kind for kind in kinds if kind in _EXCLUSIVE]
    if exclusive and len(kinds) > 1:
        return (
            f"{exclusive[0]} cannot be combined with other balancing types: {' '.join(kinds)}",
            f"use the losses, or {exclusive[0]} alone",
        )
    return None


def balanced_selection_has_no_loss(
    num_experts: int | None,
    moe_router_load_balancing_type: tuple[str, ...],
    moe_aux_loss_coeff: tuple[float, ...],
    moe_router_enable_expert_bias: bool,
    moe_router_group_topk: int | None,
    moe_router_topk_scaling_factor: float | None,
) -> Violation:
    """Balanced selection methods support no auxiliary loss, expert bias or groups."""
    kinds = [kind for kind in moe_router_load_balancing_type if kind in _EXCLUSIVE and kind != "none"]
    if not num_experts or not kinds:
        return None
    if any(moe_aux_loss_coeff) or moe_router_enable_expert_bias or moe_router_group_topk:
        return (
            f"{kinds[0]} does not support a balancing loss, expert bias or groups",
            "use --moe-aux-loss-coeff 0 without bias or groups",
        )
    if kinds[0] == "sinkhorn" and moe_router_topk_scaling_factor:
        return "sinkhorn does not support a scaling factor", "remove --moe-router-topk-scaling-factor"
    return None


def quantile_balancing_leaves_experts_out(
    num_experts: int | None, moe_router_topk: int, moe_router_load_balancing_type: tuple[str, ...]
) -> Violation:
    """The threshold separates selected from unselected experts."""
    if "quantile_balancing" not in moe_router_load_balancing_type or num_experts != moe_router_topk:
        return None
    return (
        f"--moe-router-topk {moe_router_topk} of {num_experts} selects every expert",
        "use a smaller --moe-router-topk",
    )


RULES = functions_returning(Violation, globals())
