"""Planner search: layouts fit and are at least as fast as published ones by the cost model."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from arguments import plan_search, plan_settings
from arguments.flags import Registry
from arguments.planning_tables import SEARCHED, estimate_accuracy_rows, measured_steps, search_row, with_rows
from arguments.read import read_plan
from arguments.run_length import RunLength
from megatron_moe.config.memory import MemoryConfig, RecomputeConfig
from megatron_moe.cost_model.hardware import GIB, GPUS
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.planner.estimator import known_error
from megatron_moe.planner.layouts import Layouts
from megatron_moe.planner.memory_options import bytes_saved, disabled_options
from megatron_moe.planner.search import PlannedLayout, Planner
from tools.docs_gen import PLANNING, STEP_TIMES

REGISTRY = Registry.declared()
SLOW = {"deepseek-v3-h100-1024", "deepseek-v3-gb200-256", "qwen3-235b-a22b-h100-256"}


@pytest.mark.parametrize(
    ("name", "kind", "num_gpus"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in SLOW else []) for case in SEARCHED],
)
def test_the_best_ten_beat_the_published_layout_by_the_cost_model(name, kind, num_gpus):
    settings = plan_search.settings_of(["--recipe", name], REGISTRY)
    planner = plan_settings.planner_of(settings, GPUS[kind])
    published = planner.evaluate(plan_settings.plan_as_given(settings, GPUS[kind], num_gpus))
    best = planner.fastest_plans(
        plan_search.search_start_plan(settings, GPUS[kind], num_gpus),
        10,
        partial(plan_settings.breaks_no_rule, settings),
    )
    assert planner.fits(published.memory)
    assert len(best) == 10 and best == sorted(best, key=lambda each: each.step.total)
    assert best[0].step.total <= published.step.total
    for each in best:
        assert planner.fits(planner.rank_with_peak_memory(each.plan)), plan_settings.layout_text(each)
    assert search_row(name, published, best[0]) in PLANNING.read_text(), "run python tools/docs_gen.py planning"


def test_measured_steps_are_within_the_stated_error_of_the_estimates():
    errors: dict[float, float] = {}
    for plan, measured, estimated, source in measured_steps(STEP_TIMES):
        error = known_error(plan.precision)
        deviation = abs(measured / estimated - 1)
        errors[error] = max(errors.get(error, 0.0), deviation)
        assert deviation <= error, (source, measured, estimated)
        document = (STEP_TIMES.parent / source).read_text()
        assert f"{measured:,.1f}" in document or f"{measured:.1f}" in document, f"{measured} is not in {source}"
    assert len(errors) == 2 and all(error - most < 0.05 for error, most in errors.items()), "the error is rounded up"


def test_the_planning_document_shows_the_errors_of_today():
    text = PLANNING.read_text()
    assert with_rows(text, estimate_accuracy_rows(STEP_TIMES)) == text, "run python tools/docs_gen.py planning"


def test_ways_to_fit_fit_and_are_distinct():
    settings = plan_search.settings_of("--recipe deepseek-v3-h100-1024 --micro-batch-size 4".split(), REGISTRY)
    planner = plan_settings.planner_of(settings, GPUS["h100"])
    plan = plan_settings.plan_as_given(settings, GPUS["h100"], 1024)
    ways = planner.ways_to_fit(plan)
    assert len(ways) == 3 == len({way.plan for way in ways}) and ways[0] == planner.fit_with_optimizer(plan)
    assert {way.plan.batch.micro_batch_size for way in ways} > {4}
    assert all(planner.fits(planner.rank_with_peak_memory(way.plan)) for way in ways)
    enough = planner.add_gpus_until_fit(plan)
    assert enough.plan.parallel.world_size == 2048 and planner.fits(planner.rank_with_peak_memory(enough.plan))


def q6() -> tuple[plan_search.Settings, Planner]:
    return plan_search.settings_of(["--recipe", "q6"], REGISTRY), Planner(GPUS["h200"])


def test_written_recipe_equals_the_plan(tmp_path):
    settings = plan_search.settings_of(["--recipe", "quickstart"], REGISTRY)
    planner = Planner(GPUS["h100"])
    plan = plan_search.search_start_plan(settings, planner.gpu, 8)
    layouts = Layouts(plan, planner.gpu)
    for number, grid in enumerate(islice(layouts.grids(), 0, None, 7)):
        for each in layouts.of_grid(grid):
            found = planner.evaluate(each)
            ready = plan_settings.settings_for(settings, each)
            if not plan_settings.breaks_no_rule(settings, each):
                continue
            path = tmp_path / f"{number}.yaml"
            path.write_text(plan_search.recipe_text(ready, found, planner.gpu, RunLength(), "a test"))
            environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
            read = read_plan(["--config", str(path), "--allow-ignored-flags"], environ, lambda config: 4096)
            parallel = replace(read.parallel, missing_libraries=each.parallel.missing_libraries)  # of this machine
            assert (parallel, read.layout, read.batch) == (each.parallel, each.layout, each.batch)
            options = [(one.overlap, one.delay_wgrad_compute) for one in (read.pipeline, each.pipeline)]
            assert options[0] == options[1]
            assert read.memory.recompute == each.memory.recompute
            assert read.memory.offload.offload_modules == each.memory.offload.offload_modules


def test_pipelines_without_overlap_are_also_searched_with_delayed_weight_gradients():
    plan = plan_search.search_start_plan(plan_search.settings_of(["--recipe", "quickstart"], REGISTRY), GPUS["h100"], 8)
    layouts, planner = Layouts(plan, GPUS["h100"]), Planner(GPUS["h100"])
    grids = [grid for grid in layouts.grids() if grid.parallel.pp == 2 and layouts.of(grid) is not None]
    assert {grid.parallel.ep for grid in grids} > {1}
    for grid in grids:
        plain, *others = [each for each in layouts.of_grid(grid) if each.layout.vpp == 1]
        (delayed,) = others
        assert delayed.pipeline.delays_weight_grads(2) and not plain.pipeline.delay_wgrad_compute
        before, after = (planner.evaluate(each) for each in (plain, delayed))
        assert after.step.bubble < before.step.bubble and after.memory.total >= before.memory.total
        assert "delayed weight gradients" in plan_settings.layout_text(after)


def test_more_tensor_parallel_ranks_than_query_groups_are_searched():
    settings = plan_search.settings_of(["--recipe", "qwen3-30b-a3b-h100-32"], REGISTRY)
    plan = plan_search.search_start_plan(settings, GPUS["h100"], 8)
    assert {layer.mixer.num_query_groups for layer in plan.model.layers} == {4}
    assert {grid.parallel.tp for grid in Layouts(plan, GPUS["h100"]).grids()} == {1, 2, 4, 8}


def test_fit_selects_the_cheapest_memory_options():
    settings, planner = q6()
    plan = plan_settings.plan_as_given(settings, planner.gpu, 1)
    roomy = planner.fit_memory_options(plan)
    assert roomy is not None and roomy.plan.memory.recompute == RecomputeConfig()
    planner.room = roomy.memory.total - 0.5 * GIB
    tight = planner.fit_memory_options(plan)
    assert tight is not None and tight.memory.total <= planner.room
    assert tight.step.total > roomy.step.total
    for switch in disabled_options(plan):
        changed = switch.apply(plan)
        if planner.fits(planner.rank_with_peak_memory(changed)) and changed.precision == plan.precision:
            assert tight.step.total <= planner.estimator(changed).step().total, switch.flags


def test_a_dense_model_without_room_gets_recompute():
    words = "--recipe q6 --num-experts 0 --ffn-hidden-size 8192"
    settings = plan_search.settings_of(words.split(), REGISTRY)
    planner = Planner(GPUS["h200"])
    plan = plan_settings.plan_as_given(settings, planner.gpu, 1)
    planner.room = RankMemory(plan).of_rank(0).total - 0.5 * GIB
    found = planner.fit_memory_options(plan)
    assert found is not None and found.memory.total <= planner.room
    planner.room = 0.1 * GIB
    assert planner.fit_memory_options(plan) is None


def test_master_remainders_are_enabled_before_recompute():
    words = ["--recipe", "q6", "--no-use-precision-aware-optimizer"]
    planner = Planner(GPUS["h200"])
    plan = plan_settings.plan_as_given(plan_search.settings_of(words, REGISTRY), planner.gpu, 1)
    for less, remainders in ((0.0, False), (1.0, True)):
        planner.room = RankMemory(plan).of_rank(0).total - less * GIB
        found = planner.fit_with_optimizer(plan)
        assert found is not None and found.plan.memory.recompute == RecomputeConfig()
        assert found.plan.precision == replace(plan.precision, store_param_remainders=remainders)


def test_optimizer_offload_is_the_last_resort():
    settings, planner = q6()
    plan = plan_settings.plan_as_given(settings, planner.gpu, 1)
    planner.room = RankMemory(plan).state_of_rank(0).total - 20 * GIB
    assert planner.fit_memory_options(plan) is None
    found = planner.fit_with_optimizer(plan)
    assert found is not None and found.plan.optimizer.offload.cpu_step
    planner.room = 1 * GIB
    assert planner.fit_with_optimizer(plan) is None


def test_sharding_is_proposed_where_it_is_the_fastest_way_to_fit():
    settings = plan_search.settings_of(["--recipe", "qwen3-30b-a3b-h100-32"], REGISTRY)
    planner = Planner(GPUS["h100"])
    plan = plan_settings.plan_as_given(settings, planner.gpu, 32)
    needed = planner.rank_with_peak_memory(plan).total
    for less, shards_weights in ((10, None), (30, False), (40, True)):
        planner.room = needed - less * GIB
        found = planner.fit_with_optimizer(plan)
        assert found is not None and planner.fits(planner.rank_with_peak_memory(found.plan))
        fsdp = found.plan.data_parallel.fsdp
        assert (fsdp and fsdp.shards_weights) == shards_weights, f"{less} GiB less"
        named = {None: [], False: ["sharded gradients"], True: ["sharded weights"]}[shards_weights]
        for text in (plan_settings.changes_text(plan, found.plan), plan_settings.layout_text(found)):
            assert [words for words in text.split(", ") if words.startswith("sharded")] == named
        ways = planner.ways_to_fit(plan)
        assert len({plan_settings.changes_text(plan, each.plan) for each in ways}) == len(ways)
        other = planner.fit_memory_options(plan)
        assert other is None or found.step.total <= other.step.total


def test_step_time_is_within_six_percent_of_measurements():
    """Compares with the step times in benchmarks/2026-11-21-h200-step.md, in ms."""
    planner = Planner(GPUS["h200"])
    for name, micro, measured in (("q6", 2, 321.1), ("q6", 4, 306.0), ("m8", 2, 447.2), ("m8", 4, 425.3)):
        words = ["--recipe", name, "--micro-batch-size", str(micro)]
        plan = plan_settings.plan_as_given(plan_search.settings_of(words, REGISTRY), planner.gpu, 1)
        found = planner.evaluate(plan)
        assert abs(found.step.total * 1e3 / measured - 1) < 0.06, (name, micro, found.step.total)


def test_more_work_and_slower_links_take_longer():
    settings = plan_search.settings_of(["--recipe", "qwen3-30b-a3b-h100-32"], REGISTRY)
    gpu = GPUS["h100"]
    plan = plan_settings.plan_as_given(settings, gpu, 32)
    before: PlannedLayout = Planner(gpu).evaluate(plan)
    slow = Planner(replace(gpu, network=gpu.network / 2)).evaluate(plan)
    assert slow.step.data_parallel > before.step.data_parallel and slow.step.experts == before.step.experts
    config = replace(plan.memory.recompute, recompute_modules=("moe_act",))
    with_recompute = Planner(gpu).evaluate(replace(plan, memory=MemoryConfig(recompute=config)))
    assert with_recompute.step.recompute > 0 and with_recompute.memory.total < before.memory.total
    overlapped = Planner(gpu).evaluate(replace(plan, pipeline=replace(plan.pipeline, overlap=True)))
    assert overlapped.step.expert_parallel < 0.2 * before.step.expert_parallel


@pytest.mark.parametrize("name", ["ds4", "q6"])
def test_memory_option_equals_its_flags(name):
    gpu = GPUS["h200"]
    plan = plan_settings.plan_as_given(plan_search.settings_of(["--recipe", name], REGISTRY), gpu, 1)
    for switch in disabled_options(plan):
        words = ["--recipe", name, *switch.flags.split()]
        read = plan_settings.plan_as_given(plan_search.settings_of(words, REGISTRY), gpu, 1)
        found = switch.apply(plan)
        assert (read.precision, read.batch) == (found.precision, found.batch), switch.flags
        assert RankMemory(read).of_rank(0).total == RankMemory(found).of_rank(0).total, switch.flags


def test_memory_options_save_memory():
    plan = plan_settings.plan_as_given(plan_search.settings_of(["--recipe", "m8"], REGISTRY), GPUS["h200"], 1)
    for switch in disabled_options(plan):
        if any(word in switch.flags for word in ("recompute", "exp-avg", "wgrad-interval")):
            assert bytes_saved(plan, switch, 0) > 0, switch.flags
