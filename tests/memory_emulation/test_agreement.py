"""Memory of the dry run agrees with that of the emulated run for every shipped recipe."""

from dataclasses import replace

import pytest

from arguments.flags import Registry
from megatron_moe.config.attention import ContextExchange
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.run import RunPlan
from tests.cost_model.test_memory import with_standard_permutation
from tests.helpers.thinned import thinned
from tests.memory_emulation.agreement import FEATURES, can_be_emulated, compare, missing, plan_of, without_hardware

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

REGISTRY = Registry.declared()
WITHIN = 0.03
"""Relative tolerance."""
SMALL = ("quickstart", "q6", "m8", "ds4", "olmoe-1b-7b-h100-8")


@pytest.mark.parametrize("name", SMALL)
def test_closed_form_and_emulation_agree(name: str) -> None:
    assert abs(compare(plan_of(name, REGISTRY)).ratio - 1) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in can_be_emulated() if name not in SMALL])
def test_closed_form_and_emulation_agree_for_every_recipe(name: str) -> None:
    assert abs(compare(plan_of(name, REGISTRY)).ratio - 1) < WITHIN


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_excluded_recipes_need_unavailable_layers(name: str) -> None:
    assert missing(without_hardware(name, REGISTRY)[0], 1024)


def test_standard_permutation_saves_the_expert_outputs() -> None:
    plan = plan_of("m8", REGISTRY)
    efficient, standard = compare(plan), compare(with_standard_permutation(plan))
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * plan.model.hidden_size * 2
    assert standard.emulated["activations"] - efficient.emulated["activations"] == expected
    assert standard.closed.kept - efficient.closed.kept == expected
    assert abs(standard.ratio - 1) < WITHIN


def test_delayed_expert_wgrad_keeps_inputs_and_output_gradients() -> None:
    plan = plan_of("m8", REGISTRY)
    one, two = (compare(replace(plan, memory=replace(plan.memory, expert_wgrad_interval=number))) for number in (1, 2))
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * (2 * 2048 + 3 * 1408) * 2
    assert two.closed.kept - one.closed.kept == expected
    assert two.peak - one.peak == pytest.approx(expected, rel=1e-3)  # a microbatch more is there, with its ids
    assert abs(two.ratio - 1) < WITHIN


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(recompute=RecomputeConfig(granularity="selective", modules=("moe", "mla_up_proj", "layernorm"))),
        MemoryConfig(recompute=RecomputeConfig(granularity="full", method="uniform", num_layers=1)),
        MemoryConfig(offload=ActivationOffloadConfig(modules=("expert_fc1", "moe_act"))),
        MemoryConfig(
            recompute=RecomputeConfig(granularity="selective", modules=("moe_act", "layernorm")),
            expert_wgrad_interval=3,
        ),
    ],
    ids=["moe", "whole layers", "offload", "weight gradients of experts together"],
)
def test_memory_options_agree(memory: MemoryConfig) -> None:
    assert abs(compare(replace(plan_of("m8", REGISTRY), memory=memory)).ratio - 1) < WITHIN


def test_shared_query_groups_agree() -> None:
    plan = plan_of("q6", REGISTRY)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, num_query_groups=2)) for layer in plan.model.layers)
    parallel = replace(plan.parallel, tp=8, world_size=8, sequence_parallel=True)
    found = compare(replace(plan, model=replace(plan.model, layers=layers), parallel=parallel))
    assert abs(found.ratio - 1) < WITHIN


def with_attention_dropout(plan: RunPlan, exchange: ContextExchange, cp: int) -> RunPlan:
    """The plan with --attention-dropout 0.1, --cp-comm-type `exchange` and `cp` times the ranks."""
    changes = {"dropout": 0.1, "context_exchange": exchange}
    mixers = [replace(each.mixer, core=replace(each.mixer.core, **changes)) for each in plan.model.layers]
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(plan.model.layers, mixers, strict=True))
    parallel = replace(plan.parallel, cp=cp, world_size=plan.parallel.world_size * cp)
    return replace(plan, model=replace(plan.model, layers=layers), parallel=parallel)


@pytest.mark.parametrize(("exchange", "cp"), [("p2p", 1), ("p2p", 2), ("allgather", 2), ("a2a", 2)])
@pytest.mark.parametrize("name", thinned(["m8", "ds4"]))
def test_attention_dropout_saves_values_per_query_key_pair(name: str, exchange: ContextExchange, cp: int) -> None:
    found = compare(with_attention_dropout(plan_of(name, REGISTRY), exchange, cp))
    assert abs(found.ratio - 1) < WITHIN


def test_attention_recompute_frees_the_values_of_dropout() -> None:
    plan = with_attention_dropout(plan_of("m8", REGISTRY), "p2p", 1)
    memory = MemoryConfig(recompute=RecomputeConfig(granularity="selective", modules=("core_attn",)))
    assert abs(compare(replace(plan, memory=memory)).ratio - 1) < WITHIN
