"""Memory of the cost model agrees with that of emulation for the rows of experts that fc1 gathers from tokens."""

from dataclasses import replace
from typing import Literal

import pytest

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from tests.memory_emulation.test_agreement import compare, shallow

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def with_moe_layers(dispatcher: Literal["local", "allgather"], ep: int, interval: int = 1, **options: bool) -> RunPlan:
    """Returns a plan whose peak is in MoE layers, with `options` of the FP8 recipe; no options mean bf16."""
    plan = shallow("m8")
    low = low_precision_config("blockwise", **options) if options else None
    model = replace(plan.model, loss_chunk=1024, layers=plan.model.layers[1:] * 2)
    return replace(
        plan,
        model=with_experts(model, lambda moe: replace(moe, dispatcher=dispatcher)),
        parallel=replace(plan.parallel, ep=ep, world_size=ep),
        precision=replace(plan.precision, low_precision=low),
        memory=replace(plan.memory, moe_expert_wgrad_interval=interval),
    )


@pytest.mark.parametrize("interval", [1, 2])
def test_gathered_tokens_of_all_ranks_agree(interval: int) -> None:
    """With weight gradients in bf16, fc1 saves the tokens of all ranks instead of its rows."""
    found = compare(with_moe_layers("allgather", 2, interval, weight_grad=False))
    assert abs(found.ratio - 1) < 0.005


def test_rows_that_are_summed_in_fp32_agree() -> None:
    assert abs(compare(with_moe_layers("allgather", 4)).ratio - 1) < 0.01


def test_workspace_of_expert_weight_gradients_in_bf16_agrees() -> None:
    assert compare(with_moe_layers("local", 1, expert_weight_grad=False)).ratio < 1


def test_rows_in_pages_are_not_gathered() -> None:
    plan = with_moe_layers("local", 1, weight_grad=False)
    stash = PagedStashConfig(moe_paged_stash_buffer_size_factor_cuda=1.0)
    assert abs(compare(replace(plan, memory=replace(plan.memory, paged_stash=stash))).ratio - 1) < 0.005
