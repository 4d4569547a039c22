"""Every recipe is valid, equals its published model, forms its process groups and survives a YAML round trip."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arguments.errors import Finished, FlagErrors
from arguments.export import yaml_text
from arguments.files import read_file, read_files
from arguments.flags import Registry
from arguments.parser import merge_settings
from arguments.plan_settings import plan_of
from arguments.read import read_plan
from arguments.recipe_table import Row, recipe_rows, row_of
from arguments.recipes import recipe_files, recipe_names
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.config.model_differences import config_differences
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.parallel.grid import all_groups
from tests.helpers.zoo import model_config, zoo_rows

REGISTRY = Registry.declared()
TABLE = {row.name: row for row in recipe_rows(REGISTRY)}
ZOO = {str(row): row for row in zoo_rows()}
PUBLISHED = json.loads((Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text())
OF_THE_ZOO = [row for row in TABLE.values() if row.about.model in ZOO]
HYBRIDS = {
    "DeepSeek-V3.2": ("671.88", "38.40"),  # 671.03 of DeepSeek-V3 and 61 indexers
    "GLM-5": ("743.91", "41.78"),
    "Kimi-Linear-48B-A3B": ("49.12", "3.48"),
    "Nemotron-3-Nano-30B-A3B": ("31.58", "3.58"),
    "Nemotron-3-Super-120B-A12B": ("120.67", "12.77"),
    "Nemotron-3-Ultra-550B-A55B": ("549.31", "56.06"),
    "Nemotron-3.5-Lightning-30B-A3B": ("31.58", "3.58"),
    "Nemotron-H-56B": ("56.32", "56.32"),
    "Qwen3-Next-80B-A3B": ("79.67", "3.87"),
    "Qwen3.5-35B-A3B": ("34.66", "3.45"),
}
"""Models with other mixers than attention -> published billions of parameters without multi-token prediction, and of
parameters that process a token."""
WITHOUT_A_ROW = {
    "DeepSeek-V4-Flash", "DeepSeek-V4-Pro", *HYBRIDS, "Quickstart",
    "DeepSeek-V3, 4 layers of 8 experts", "Moonlight-16B-A3B, 8 layers", "Qwen3-30B-A3B, 6 layers",
    "Qwen3-30B-A3B, 24 layers", "Mixtral-8x22B, 2 layers",
    "Qwen3-Next-80B-A3B, 4 layers", "Nemotron-3-Nano-30B-A3B, 9 layers",
}  # fmt: skip
"""Models with other layers than the rows of the table, and truncated models."""


def launched(num_ranks: int, ranks_per_host: int) -> dict[str, str]:
    """The environment of rank 0 under torchrun."""
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(ranks_per_host)}
    return {"RANK": "0", "LOCAL_RANK": "0", **sizes}


def launched_as_planned(row: Row) -> dict[str, str]:
    """The environment of rank 0 on the machine of the recipe."""
    return launched(row.plan.process.world_size, row.plan.process.local_world_size)


def is_unpublished(row: Row) -> bool:
    """Whether a part of its layout, batch or recompute is not published."""
    return row.about.gpu == "h200" or "ours" in row.about.source or bool(row.about.corrections)


def is_long(row: Row) -> bool:
    """Whether the name of the recipe states a long sequence."""
    return row.name.endswith(("-64k", "-128k", "-256k"))


def texts_of(words: str, num_ranks: int) -> list[str]:
    """Problems of a command line."""
    with pytest.raises(FlagErrors) as caught:
        read_plan(words.split(), launched(num_ranks, min(num_ranks, 8)))
    return [problem.what for problem in caught.value.problems]


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_a_recipe_violates_only_rules_about_missing_features(row: Row):
    assert [problem.what for problem in row.problems if not problem.waits] == []
    assert row.settings.notes == []


@pytest.mark.usefixtures("deep_ep_stand_in")  # the machine of the recipe has these libraries
@pytest.mark.parametrize("row", [row for row in TABLE.values() if not row.waits_for], ids=lambda row: row.name)
def test_a_supported_recipe_is_accepted_on_its_ranks(row: Row):
    plan = read_plan(
        ["--recipe", row.name], launched_as_planned(row), vocab_size_of=lambda config: row.plan.data.vocab_size
    )
    assert plan.model == row.plan.model
    assert replace(plan.parallel, missing_libraries=()) == row.plan.parallel


@pytest.mark.parametrize("row", OF_THE_ZOO, ids=lambda row: row.name)
def test_a_recipe_equals_the_published_model(row: Row):
    published = ZOO[row.about.model]
    assert config_differences(row.plan.model, model_config(published)) == []
    total = count_parameters(row.plan.model).without_mtp.total
    active = count_parameters(row.plan.model, active=True).without_mtp.total
    expected = published.cells["computed-total-B"], published.cells["computed-active-B"]
    assert (f"{total / 1e9:.2f}", f"{active / 1e9:.2f}") == expected


@pytest.mark.parametrize(
    "row", [row for row in TABLE.values() if row.about.model in PUBLISHED], ids=lambda row: row.name
)
def test_a_recipe_equals_the_published_config(row: Row):
    model, values = row.plan.model, PUBLISHED[row.about.model]
    published = with_latent_norms_of(model, model_config_from_hf(values, mtp=model.mtp is not None))
    assert config_differences(model, published) == []
    assert model.vocab_size == published.vocab_size
    assert model.max_positions == max(published.max_positions, row.plan.data.seq_length)


@pytest.mark.parametrize("row", [row for row in TABLE.values() if row.about.model in HYBRIDS], ids=lambda row: row.name)
def test_a_hybrid_has_the_published_number_of_parameters(row: Row):
    total = count_parameters(row.plan.model).without_mtp.total
    active = count_parameters(row.plan.model, active=True).without_mtp.total
    assert (f"{total / 1e9:.2f}", f"{active / 1e9:.2f}") == HYBRIDS[row.about.model]


def test_every_model_is_in_the_table_or_a_known_exception():
    assert {row.about.model for row in TABLE.values()} - set(ZOO) == WITHOUT_A_ROW


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_all_ranks_agree_on_groups_that_cover_the_world_once(row: Row):
    parallel = row.plan.parallel
    assert parallel.world_size == row.about.gpus
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}
    sizes |= {"etp": parallel.etp, "ep": parallel.ep, "edp": parallel.edp}
    groups = all_groups(parallel)
    for name, of_name in groups.items():
        assert sorted(rank for group in of_name for rank in group) == list(range(row.about.gpus)), name
    assert {name: {len(group) for group in groups[name]} for name in sizes} == {name: {n} for name, n in sizes.items()}


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_a_recipe_survives_a_yaml_round_trip(tmp_path, row: Row):
    path = tmp_path / "run.yaml"
    path.write_text(yaml_text(row.settings, {}), encoding="utf-8")
    resettled = merge_settings(REGISTRY, [read_file(path, REGISTRY, {}).flags])
    assert (resettled.problems, resettled.notes) == ([], [])
    assert plan_of(resettled, row.plan.process) == row.plan


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE.values() if row in OF_THE_ZOO and is_unpublished(row) or is_long(row)],
    ids=lambda row: row.name,
)
def test_unpublished_and_long_layouts_fit_the_gpu_memory(row: Row):
    """Other published layouts have run on their hardware; these are verified by the dry run."""
    with pytest.raises(Finished) as caught:
        read_plan(["--recipe", row.name, "--dry-run=json"], {}, vocab_size_of=lambda config: config.vocab_size or 0)
    assert json.loads(caught.value.text)["memory"]["fits"]


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_only_recipes_of_benchmarks_force_the_routing(row: Row):
    path = dict(recipe_files())[f"{row.family}/{row.name}" if row.family != row.name else row.name]
    assert bool(row.plan.warning) == path.read_text().startswith("# Benchmark: ")


ADAMW = ("adam", 2e-4, 2e-5, False)
MUON = ("muon", 0.95, True, "spectral", 0.2)
OPTIMIZERS = {
    "kimi-k2-gb200-128": ADAMW,
    "kimi-k2-gb200-128-128k": ADAMW,
    "kimi-k2-gb300-256": (*MUON, "blockwise", 2e-4, 2e-5, True),
    "kimi-k2-h100-1024": (*MUON, "blockwise", 2e-4, 2e-5, True),
    "kimi-linear-48b-a3b-h100-64": ("adam", 1.2e-4, 1.2e-5, False),
    "moonlight-16b-a3b-h100-16": (*MUON, "duplicated", 4.2e-4, 4.2e-5, False),
    "moonlight-16b-a3b-h100-8": (*MUON, "duplicated", 4.2e-4, 4.2e-5, False),
}
"""Recipe -> optimizer; with Muon momentum, Nesterov, scale, its extra factor and tensor-parallel mode; highest and
lowest learning rate; QK-clip."""


def test_optimizers_of_the_models_that_were_published_with_muon() -> None:
    def described(row: Row) -> tuple[object, ...]:
        optimizer, lr = row.plan.optimizer, row.plan.lr_schedule
        muon, end = optimizer.muon, (lr.max_lr, lr.min_lr, optimizer.qk_clip is not None)
        if optimizer.optimizer == "adam":
            return optimizer.optimizer, *end
        scale = muon.muon_scale_mode, muon.muon_extra_scale_factor
        return optimizer.optimizer, muon.muon_momentum, muon.muon_nesterov, *scale, muon.muon_tp_mode, *end

    found = {name: described(row) for name, row in TABLE.items() if row.family in ("kimi", "moonlight")}
    assert found == OPTIMIZERS


TRAINING = {
    "DeepSeek-V2": (2.4e-4, 2.4e-5, 0.006, 1e-3, None),  # arXiv 2405.04434
    "DeepSeek-V2-Lite": (4.2e-4, 4.2e-5, 0.006, 1e-3, None),  # as above, appendix B
    "DeepSeek-V3": (2.2e-4, 2.2e-5, 0.006, 1e-4, 0.3),  # arXiv 2412.19437
    "DeepSeek-V3.2": (7.3e-6, 7.3e-6, 0.006, 1e-4, 0.1),  # arXiv 2512.02556; MTP: last stage of DeepSeek-V3
    "DeepSeek-V4-Flash": (2.7e-4, 2.7e-5, 0.02, 1e-4, 0.3),  # DeepSeek_V4.pdf in deepseek-ai/DeepSeek-V4-Pro
    "DeepSeek-V4-Pro": (2e-4, 2e-5, 0.02, 1e-4, 0.3),
    "GLM-4.5": (2.5e-4, 2.5e-5, 0.02, 1e-4, 0.3),  # arXiv 2508.06471
    "GLM-4.5-Air": (2.5e-4, 2.5e-5, 0.02, 1e-4, 0.3),
    "Kimi-K2": (2e-4, 2e-5, 0.02, 1e-3, None),  # arXiv 2507.20534; loss: config.json
    "Ling-mini-2.0": (3.36e-4, 3.36e-5, 0.006, 0.0, 0.1),  # arXiv 2510.22115
    "Moonlight-16B-A3B": (4.2e-4, 4.2e-5, 0.02, 1e-3, None),  # arXiv 2502.16982; loss: config.json
    "Nemotron-3-Nano-30B-A3B": (1e-3, 1e-5, 0.0173, 1e-4, None),  # arXiv 2512.20848; initialisation: Megatron-Bridge
    "Nemotron-3-Super-120B-A12B": (4.5e-4, 4.5e-6, 0.014, 1e-4, 0.3),  # Megatron-Bridge, recipes/nemotronh
    "Nemotron-3-Ultra-550B-A55B": (8e-4, 8e-6, 0.0099, 1e-4, 0.3),  # Megatron-Bridge, perf_recipes/nemotronh
    "Nemotron-3.5-Lightning-30B-A3B": (1e-3, 1e-5, 0.0173, 1e-4, 0.3),
    "OLMoE-1B-7B": (4e-4, 4e-5, 0.02, 1e-2, None),  # configs of github.com/allenai/OLMoE
}
"""Model -> published settings of its training, at its start: highest and lowest learning rate, standard deviation of
the initial weights, coefficient of the balancing loss, weight of multi-token prediction."""


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE.values() if row.about.model in TRAINING and row.family != "h200"],
    ids=lambda row: row.name,
)
def test_a_recipe_trains_as_published(row: Row) -> None:
    model, lr = row.plan.model, row.plan.lr_schedule
    ((coefficient,),) = {moe.router.aux_loss_coeffs for moe in model.moe_configs}
    weight = model.mtp.loss_scaling_factor if model.mtp else None
    assert (lr.max_lr, lr.min_lr, model.init.std, coefficient, weight) == TRAINING[row.about.model]


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b-h100-16", "nemotron-h-56b-h100-64"])
def test_fp8_of_megatron_bridge_on_hopper(name: str) -> None:
    """Its performance recipes have one scale per tensor, in all layers, and gather weights in FP8."""
    precision = TABLE[name].plan.precision
    fp8 = precision.low_precision
    assert fp8 and precision.low_precision_params
    assert (fp8.recipe, fp8.weights.element, fp8.grads.element) == ("tensorwise", "e4m3", "e5m2")
    assert (fp8.layers_at_start, fp8.layers_at_end) == (0, 0)


def test_a_name_means_one_file():
    stems = [name.rsplit("/", 1)[-1] for name, _ in recipe_files() if not name.startswith("parts/")]
    assert sorted(stems) == recipe_names()


def test_every_included_file_belongs_to_a_recipe():
    named = dict(recipe_files())
    recipes = [path for name, path in named.items() if not name.startswith("parts/")]
    used = {file.path for recipe in recipes for file in read_files(recipe, REGISTRY, {})}
    assert used == set(named.values())


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_a_recipe_names_its_hardware_and_source(row: Row):
    about = row.about
    assert about.model and about.gpus >= 1
    assert about.gpu in ("", "h100", "h200", "b200", "b300", "gb200", "gb300")
    assert about.gpu == "" or about.source or about.gpu == "h200"
    assert about.source or not (about.published or about.corrections)


def test_corrected_layouts_were_invalid(tmp_path):
    kimi = texts_of("--recipe kimi-k2-gb200-128 --expert-model-parallel-size 64", 128)
    assert "experts cannot be folded: 1 x 64 x 4 = 256 does not divide 128 ranks" in kimi
    path = tmp_path / "original.yaml"
    path.write_text(
        "pipeline-model-parallel-layout: null\nnum-virtual-stages-per-pipeline-rank: 4\n"
        "decoder-first-pipeline-num-layers: 4\ndecoder-last-pipeline-num-layers: 1\n"
    )
    stages = texts_of(f"--recipe kimi-k2-gb200-128 --config {path}", 128)
    assert any("1 layer" in text and "4 virtual stages" in text for text in stages), stages
    v2 = "--recipe deepseek-v2-h100-256 --num-layers-per-virtual-pipeline-stage 1"
    assert "both the number of virtual stages and their number of layers are given" in texts_of(v2, 256)


def test_an_unknown_recipe_is_rejected_with_similar_names():
    with pytest.raises(FlagErrors) as caught:
        read_plan(["--recipe", "deepseek-v3-h100-1042"], {})
    (problem,) = caught.value.problems
    assert "deepseek-v3-h100-1024" in problem.remedy


def test_the_command_line_overrides_a_recipe():
    words = "--recipe q6 --num-layers 2 --train-iters 7 --lr 1e-3".split()
    plan = read_plan(words, {}, vocab_size_of=lambda config: 151936)
    assert (len(plan.model.layers), plan.loop.train_iters, plan.lr_schedule.max_lr) == (2, 7, 1e-3)
    assert row_of("q6", REGISTRY).plan.loop.train_iters == 50
