"""Conditions under which experts compute weight gradients in FP8."""

import pytest

from arguments.explain import derived_value_comments
from arguments.read import read_plan


@pytest.mark.parametrize(
    ("more", "in_fp8"),
    [
        ("--recipe ds4", True),  # 4096 rows per expert, widths 7168 and 2048
        ("--recipe x2", True),  # 2048 rows, 6144 and 16384
        ("--recipe x2 --micro-batch-size 1", False),
        ("--recipe ds4 --moe-ffn-hidden-size 1536", False),
        ("--recipe m8", False),
        ("--recipe m8 --fp8-expert-wgrad always", True),
        ("--recipe ds4 --fp8-expert-wgrad never", False),
        ("--recipe m8 --fp8-recipe tensorwise", True),
    ],
)
def test_experts_have_fp8_weight_gradients_where_they_are_faster(more: str, in_fp8: bool):
    plan = read_plan(["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", *more.split()], {})
    low = plan.precision.low_precision
    assert low.weight_grad and low.of_experts.weight_grad == in_fp8
    line = "derived: weight gradients of routed experts in the dtype of the parameters (--fp8-expert-wgrad)"
    assert (line in derived_value_comments(plan)) == (not in_fp8)


def test_rows_per_expert_grow_with_the_ranks_that_share_the_experts():
    more = "--recipe x2 --micro-batch-size 1 --fp8-format e4m3 --fp8-recipe blockwise --expert-model-parallel-size 2"
    plan = read_plan(more.split(), {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert plan.precision.low_precision.of_experts.weight_grad
