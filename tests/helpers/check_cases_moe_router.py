"""Cases of the router rules (arguments/checks/moe_router.py)."""

from tests.helpers.check_cases import BALANCING, Case

CASES = (
    Case(
        "topk_is_at_most_experts", "--moe-router-topk 9", "--moe-router-topk 9 exceeds 8 experts", "--moe-router-topk 8"
    ),
    Case(
        "router_groups_divide_experts",
        "--moe-router-num-groups 3 --moe-router-group-topk 2",
        "3 groups do not divide 8 experts",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    Case(
        "group_limit_is_complete",
        "--moe-router-group-topk 2",
        "--moe-router-group-topk without groups",
        "--moe-router-group-topk 2 --moe-router-num-groups 2",
    ),
    Case(
        "group_limit_is_complete",
        "--moe-router-topk 3 --moe-router-group-topk 3 --moe-router-num-groups 2",
        "--moe-router-group-topk 3 exceeds 2 groups",
        "--moe-router-topk 3 --moe-router-group-topk 2 --moe-router-num-groups 2",
    ),
    Case(
        "group_limit_leaves_enough_experts",
        "--moe-router-num-groups 8 --moe-router-group-topk 1",
        "1 of 8 groups: 1 expert, fewer than top-2 needs",
        "--moe-router-num-groups 8 --moe-router-group-topk 2",
    ),
    Case(
        "group_limit_leaves_enough_experts",
        "--moe-router-num-groups 4 --moe-router-group-topk 3",
        "top-2 cannot be spread over 3 groups",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    Case(
        "expert_bias_needs_independent_scores",
        "--moe-router-enable-expert-bias",
        "does not support softmax",
        "--moe-router-enable-expert-bias --moe-router-score-function sqrtsoftplus",
    ),
    Case(
        "top1_needs_pre_softmax",
        "--moe-router-topk 1",
        "gives the router no gradient",
        f"--moe-router-topk 1 {BALANCING} sinkhorn --moe-aux-loss-coeff 0",
    ),
    Case(
        "one_coefficient_per_balancing_type",
        f"{BALANCING} aux_loss seq_aux_loss",
        "2 balancing types, but 1 coefficient",
        f"{BALANCING} aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
    ),
    Case("balancing_types_combine", f"{BALANCING}", "no balancing type", f"{BALANCING} none"),
    Case(
        "balancing_types_combine",
        f"{BALANCING} aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1",
        "given twice: aux_loss aux_loss",
        f"{BALANCING} aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1",
    ),
    Case(
        "balancing_types_combine",
        f"{BALANCING} aux_loss none --moe-aux-loss-coeff 0.1 0.1",
        "none cannot be combined with other",
        f"{BALANCING} none",
    ),
    Case(
        "balanced_selection_has_no_loss",
        f"{BALANCING} expert_choice",
        "expert_choice does not support a balancing loss",
        f"{BALANCING} expert_choice --moe-aux-loss-coeff 0",
    ),
    Case(
        "balanced_selection_has_no_loss",
        f"{BALANCING} sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk-scaling-factor 2",
        "does not support a scaling factor",
        f"{BALANCING} sinkhorn --moe-aux-loss-coeff 0",
    ),
    Case(
        "quantile_balancing_leaves_experts_out",
        f"{BALANCING} quantile_balancing --moe-aux-loss-coeff 0 --moe-router-topk 8",
        "--moe-router-topk 8 of 8 selects every expert",
        f"{BALANCING} quantile_balancing --moe-aux-loss-coeff 0 --moe-router-topk 7",
    ),
)
