"""Planner search: layouts fit and are at least as fast as published ones by the cost model."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from arguments import plan_search
from arguments.flags import Registry
from arguments.read import read_plan
from megatron_moe.config.memory import MemoryConfig
from megatron_moe.cost_model.hardware import GIB, GPUS
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.planner.layouts import Layouts
from megatron_moe.planner.memory_options import more_switches, saved
from megatron_moe.planner.search import PlannedLayout, Planner

REGISTRY = Registry.declared()
PUBLISHED = (
    ("deepseek-v3-h100-1024", "h100", 1024),
    ("deepseek-v3-gb200-256", "gb200", 256),
    ("qwen3-235b-a22b-h100-256", "h100", 256),
    ("qwen3-30b-a3b-h100-32", "h100", 32),
)
SLOW = {"deepseek-v3-h100-1024", "deepseek-v3-gb200-256", "qwen3-235b-a22b-h100-256"}


@pytest.mark.parametrize(
    ("name", "kind", "num_gpus"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in SLOW else []) for case in PUBLISHED],
)
def test_the_best_ten_beat_the_published_layout_by_the_cost_model(name, kind, num_gpus):
    settings = plan_search.settings_of(["--recipe", name], REGISTRY)
    planner = plan_search.planner_of(settings, GPUS[kind])
    published = planner.evaluate(plan_search.as_given(settings, GPUS[kind], num_gpus))
    best = planner.best(plan_search.to_search(settings, GPUS[kind], num_gpus), 10, partial(plan_search.legal, settings))
    assert planner.fits(published.memory)
    assert len(best) == 10 and best == sorted(best, key=lambda each: each.step.total)
    assert best[0].step.total <= published.step.total
    for each in best:
        assert planner.fits(planner.heaviest(each.plan)), plan_search.layout_text(each)


def q6() -> tuple[plan_search.Settings, Planner]:
    return plan_search.settings_of(["--recipe", "q6"], REGISTRY), Planner(GPUS["h200"])


def test_written_recipe_equals_the_plan(tmp_path):
    settings = plan_search.settings_of(["--recipe", "quickstart"], REGISTRY)
    planner = Planner(GPUS["h100"])
    plan = plan_search.to_search(settings, planner.gpu, 8)
    layouts = Layouts(plan, planner.gpu)
    for number, grid in enumerate(islice(layouts.grids(), 0, None, 7)):
        for each in layouts.of_grid(grid):
            found = planner.evaluate(each)
            ready = plan_search.settings_for(settings, each)
            if not plan_search.legal(settings, each):
                continue
            path = tmp_path / f"{number}.yaml"
            path.write_text(plan_search.recipe(ready, found, planner.gpu, "a test"))
            environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
            read = read_plan(["--config", str(path), "--allow-ignored-flags"], environ, lambda config: 4096)
            assert (read.parallel, read.layout, read.batch) == (each.parallel, each.layout, each.batch)
            assert read.pipeline.overlap == each.pipeline.overlap
            assert read.memory.recompute.recompute_granularity == each.memory.recompute.recompute_granularity
            assert read.memory.offload.offload_modules == each.memory.offload.offload_modules


def test_more_tensor_parallel_ranks_than_query_groups_are_searched():
    settings = plan_search.settings_of(["--recipe", "qwen3-30b-a3b-h100-32"], REGISTRY)
    plan = plan_search.to_search(settings, GPUS["h100"], 8)
    assert {layer.mixer.num_query_groups for layer in plan.model.layers} == {4}
    assert {grid.parallel.tp for grid in Layouts(plan, GPUS["h100"]).grids()} == {1, 2, 4, 8}


def test_fit_selects_the_cheapest_memory_options():
    settings, planner = q6()
    plan = plan_search.as_given(settings, planner.gpu, 1)
    roomy = planner.fit(plan)
    assert roomy is not None and roomy.plan.memory.recompute.recompute_granularity == "none"
    planner.room = roomy.memory.total - 0.5 * GIB
    tight = planner.fit(plan)
    assert tight is not None and tight.memory.total <= planner.room
    assert tight.step.total > roomy.step.total
    for switch in more_switches(plan):
        changed = switch.apply(plan)
        if planner.fits(planner.heaviest(changed)) and changed.precision == plan.precision:
            assert tight.step.total <= planner.estimator(changed).step().total, switch.flags


def test_master_remainders_are_enabled_before_recompute():
    words = ["--recipe", "q6", "--no-use-precision-aware-optimizer"]
    planner = Planner(GPUS["h200"])
    plan = plan_search.as_given(plan_search.settings_of(words, REGISTRY), planner.gpu, 1)
    for less, remainders in ((0.0, False), (1.0, True)):
        planner.room = RankMemory(plan).of_rank(0).total - less * GIB
        found = planner.fit_with_optimizer(plan)
        assert found is not None and found.plan.memory.recompute.recompute_granularity == "none"
        assert found.plan.precision == replace(plan.precision, store_param_remainders=remainders)


def test_optimizer_offload_is_the_last_resort():
    settings, planner = q6()
    plan = plan_search.as_given(settings, planner.gpu, 1)
    planner.room = RankMemory(plan).state_of_rank(0).total - 20 * GIB
    assert planner.fit(plan) is None
    found = planner.fit_with_optimizer(plan)
    assert found is not None and found.plan.optimizer.offload.cpu_step
    planner.room = 1 * GIB
    assert planner.fit_with_optimizer(plan) is None


def test_step_time_is_within_six_percent_of_measurements():
    """Milliseconds of benchmarks/2026-11-21-h200-step.md."""
    planner = Planner(GPUS["h200"])
    for name, micro, measured in (("q6", 2, 321.1), ("q6", 4, 306.0), ("m8", 2, 447.2), ("m8", 4, 425.3)):
        words = ["--recipe", name, "--micro-batch-size", str(micro)]
        plan = plan_search.as_given(plan_search.settings_of(words, REGISTRY), planner.gpu, 1)
        found = planner.evaluate(plan)
        assert abs(found.step.total * 1e3 / measured - 1) < 0.06, (name, micro, found.step.total)


def test_more_work_and_slower_links_take_longer():
    settings = plan_search.settings_of(["--recipe", "qwen3-30b-a3b-h100-32"], REGISTRY)
    gpu = GPUS["h100"]
    plan = plan_search.as_given(settings, gpu, 32)
    before: PlannedLayout = Planner(gpu).evaluate(plan)
    slow = Planner(replace(gpu, network=gpu.network / 2)).evaluate(plan)
    assert slow.step.data_parallel > before.step.data_parallel and slow.step.experts == before.step.experts
    config = replace(plan.memory.recompute, recompute_granularity="selective", recompute_modules=("moe_act",))
    with_recompute = Planner(gpu).evaluate(replace(plan, memory=MemoryConfig(recompute=config)))
    assert with_recompute.step.recompute > 0 and with_recompute.memory.total < before.memory.total
    overlapped = Planner(gpu).evaluate(replace(plan, pipeline=replace(plan.pipeline, overlap=True)))
    assert overlapped.step.expert_parallel < 0.2 * before.step.expert_parallel


@pytest.mark.parametrize("name", ["ds4", "q6"])
def test_memory_option_equals_its_flags(name):
    gpu = GPUS["h200"]
    plan = plan_search.as_given(plan_search.settings_of(["--recipe", name], REGISTRY), gpu, 1)
    for switch in more_switches(plan):
        words = ["--recipe", name, *switch.flags.split()]
        read = plan_search.as_given(plan_search.settings_of(words, REGISTRY), gpu, 1)
        found = switch.apply(plan)
        assert (read.precision, read.batch) == (found.precision, found.batch), switch.flags
        assert RankMemory(read).of_rank(0).total == RankMemory(found).of_rank(0).total, switch.flags


def test_memory_options_save_memory():
    plan = plan_search.as_given(plan_search.settings_of(["--recipe", "m8"], REGISTRY), GPUS["h200"], 1)
    for switch in more_switches(plan):
        if any(word in switch.flags for word in ("recompute", "exp-avg", "wgrad-interval")):
            assert saved(plan, switch, 0) > 0, switch.flags
