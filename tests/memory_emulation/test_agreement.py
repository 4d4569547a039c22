"""The closed form of the dry run and the emulation of the real program say the same of every shipped recipe."""

from dataclasses import replace

import pytest

from arguments.flags import Registry
from megatron_moe.config.attention import ContextExchange
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from tests.helpers.thinned import thinned
from tests.memory_emulation.agreement import FEATURES, can_be_emulated, compare, missing, plan_of, without_hardware

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

REGISTRY = Registry.declared()
WITHIN = 0.03
"""Of the closed form."""
SMALL = ("quickstart", "q6", "m8", "ds4", "olmoe-1b-7b-h100-8")


@pytest.mark.parametrize("name", SMALL)
def test_closed_form_and_emulation_agree(name: str) -> None:
    assert abs(compare(plan_of(name, REGISTRY)).ratio - 1) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in can_be_emulated() if name not in SMALL])
def test_closed_form_and_emulation_agree_for_every_recipe(name: str) -> None:
    assert abs(compare(plan_of(name, REGISTRY)).ratio - 1) < WITHIN


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_a_recipe_that_is_left_out_asks_for_layers_that_are_not_available(name: str) -> None:
    assert missing(without_hardware(name, REGISTRY)[0], 1024)


def weighed_behind_the_experts(plan: RunPlan) -> RunPlan:
    """--no-moe-memory-efficient-permutation"""
    layers = []
    for layer in plan.model.layers:
        config = layer.feed_forward
        if isinstance(config, MoEConfig):
            config = replace(config, experts=replace(config.experts, probs_on_output=True))
        layers.append(replace(layer, feed_forward=config))
    return replace(plan, model=replace(plan.model, layers=tuple(layers)))


def test_the_standard_permutation_keeps_the_experts_results() -> None:
    plan = plan_of("m8", REGISTRY)
    efficient, standard = compare(plan), compare(weighed_behind_the_experts(plan))
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * plan.model.hidden_size * 2
    assert standard.emulated["activations"] - efficient.emulated["activations"] == expected
    assert standard.closed.kept - efficient.closed.kept == expected
    assert abs(standard.ratio - 1) < WITHIN


def test_rows_that_wait_for_weight_gradients_are_inputs_and_gradients_of_both_products() -> None:
    plan = plan_of("m8", REGISTRY)
    one, two = (
        compare(replace(plan, memory=replace(plan.memory, moe_expert_wgrad_interval=number))) for number in (1, 2)
    )
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * (2 * 2048 + 3 * 1408) * 2
    assert two.closed.kept - one.closed.kept == expected
    assert two.peak - one.peak == pytest.approx(expected, rel=1e-3)  # a microbatch more is there, with its ids
    assert abs(two.ratio - 1) < WITHIN


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(
            recompute=RecomputeConfig(
                recompute_granularity="selective", recompute_modules=("moe", "mla_up_proj", "layernorm")
            )
        ),
        MemoryConfig(
            recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        ),
        MemoryConfig(offload=ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"))),
        MemoryConfig(
            recompute=RecomputeConfig(recompute_granularity="selective", recompute_modules=("moe_act", "layernorm")),
            moe_expert_wgrad_interval=3,
        ),
    ],
    ids=["moe", "whole layers", "offload", "weight gradients of experts together"],
)
def test_switches_are_counted_alike(memory: MemoryConfig) -> None:
    assert abs(compare(replace(plan_of("m8", REGISTRY), memory=memory)).ratio - 1) < WITHIN


def test_query_groups_that_ranks_share_are_counted_alike() -> None:
    plan = plan_of("q6", REGISTRY)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, num_query_groups=2)) for layer in plan.model.layers)
    parallel = replace(plan.parallel, tp=8, world_size=8, sequence_parallel=True)
    found = compare(replace(plan, model=replace(plan.model, layers=layers), parallel=parallel))
    assert abs(found.ratio - 1) < WITHIN


def with_dropout_of_attention(plan: RunPlan, exchange: ContextExchange, cp: int) -> RunPlan:
    """--attention-dropout 0.1 --cp-comm-type EXCHANGE --context-parallel-size CP, on so many times the ranks"""
    layers = []
    for layer in plan.model.layers:
        core = replace(layer.mixer.core, dropout=0.1, context_exchange=exchange)
        layers.append(replace(layer, mixer=replace(layer.mixer, core=core)))
    parallel = replace(plan.parallel, cp=cp, world_size=plan.parallel.world_size * cp)
    return replace(plan, model=replace(plan.model, layers=tuple(layers)), parallel=parallel)


@pytest.mark.parametrize(("exchange", "cp"), [("p2p", 1), ("p2p", 2), ("allgather", 2), ("a2a", 2)])
@pytest.mark.parametrize("name", thinned(["m8", "ds4"]))
def test_dropout_of_attention_takes_a_number_per_pair_of_query_and_key(
    name: str, exchange: ContextExchange, cp: int
) -> None:
    found = compare(with_dropout_of_attention(plan_of(name, REGISTRY), exchange, cp))
    assert abs(found.ratio - 1) < WITHIN


def test_dropout_of_attention_is_freed_where_attention_is_computed_again() -> None:
    plan = with_dropout_of_attention(plan_of("m8", REGISTRY), "p2p", 1)
    memory = MemoryConfig(
        recompute=RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",))
    )
    assert abs(compare(replace(plan, memory=memory)).ratio - 1) < WITHIN
