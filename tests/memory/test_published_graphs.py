"""Combinations of CUDA graphs with other features in shipped recipes and published layouts.

For each combination, a tiny run checks that replays of the stand-in equal eager steps bit for bit.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arguments.errors import FlagErrors
from arguments.read import read_plan
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from tests.helpers import tiny, tiny_models
from tests.helpers.pipelines import laid_out
from tests.helpers.thinned import thinned
from tests.memory.test_graph_combinations import FLEX, ON_HOST, OVERLAP, STASH, check, modules, selective
from tests.recipes.published import Case, published, shipped

TABLE = Path(__file__).parents[1] / "goldens" / "published_graphs.txt"
"""Table with one combination per line and its number of recipes and layouts; UPDATE_GOLDENS=1 writes it."""
COMBINATIONS = [line.partition(" ")[2] for line in TABLE.read_text().splitlines()]


def features_of(plan: RunPlan) -> str:
    """Returns a plan's combination, such as "graphs=attn,moe_router ep pairs recipe=mxfp8", or "" without graphs."""
    graphs, memory, parallel, pipeline = plan.cuda_graphs, plan.memory, plan.parallel, plan.pipeline
    if not (graphs.full_iteration or graphs.cuda_graph_modules):
        return ""
    moe = next((layer.moe for layer in plan.model.layers if layer.moe), None)
    names = {
        "graphs": "full_iteration" if graphs.full_iteration else ",".join(sorted(graphs.cuda_graph_modules)),
        "exchange": moe.transport(parallel).name if moe and graphs.full_iteration else "",
        "recompute": ",".join(sorted(memory.recompute.recompute_modules)),
        "offload": ",".join(sorted(memory.offload.offload_modules)),
        "recipe": plan.precision.low_precision.recipe if plan.precision.low_precision else "",
    }
    given = {
        **{axis: getattr(parallel, axis) > 1 for axis in ("ep", "tp", "cp", "pp")},
        "vpp": pipeline.layout.vpp > 1,
        "pairs": pipeline.overlap,
        "later": pipeline.delay_wgrad_compute,
        "gathers": plan.data_parallel.overlap_param_gather,
        "fsdp": plan.data_parallel.fsdp is not None,
        "mtp": plan.model.mtp is not None,
        "mamba": any(isinstance(layer.mixer, MambaConfig) for layer in plan.model.layers),
        "streams": any(isinstance(layer.residual, HyperConnectionsConfig) for layer in plan.model.layers),
        "stash": memory.paged_stash is not None,
        "delayed": memory.offload.delay_offload_until_cuda_graph,
    }
    words = [f"{name}={value}" for name, value in names.items() if value]
    return " ".join([words[0], *(name for name, is_given in given.items() if is_given), *words[1:]])


def combinations(cases: list[Case]) -> Iterator[str]:
    for case in cases:
        try:
            words = [*case.words, "--fake-init-process-group"]
            plan = read_plan(words, {}, lambda config: config.vocab_size or 512, waiting=True)
        except FlagErrors:
            continue  # tests/recipes/test_published.py checks which layouts are rejected
        if features_of(plan) and not plan.blockers:
            yield features_of(plan)


def names_graphs(case: Case) -> bool:
    return "--cuda-graph-impl" in case.words


@pytest.mark.slow
def test_the_table_has_every_combination() -> None:
    found = Counter(combinations([*shipped(), *published()]))
    text = "".join(f"{number} {features}\n" for features, number in sorted(found.items()))
    if os.environ.get("UPDATE_GOLDENS"):
        TABLE.write_text(text)
    assert text == TABLE.read_text()


@pytest.mark.parametrize("case", thinned(filter(names_graphs, published()), 24), ids=lambda case: case.name)
def test_combinations_of_published_layouts_have_a_replay_test(case: Case) -> None:
    for features in combinations([case]):
        assert features in COMBINATIONS, f"run this module's slow test with UPDATE_GOLDENS=1: {features} is new"


def model_with(words: set[str], values: dict[str, str], num_layers: int) -> ModelConfig:
    """Builds a model of one dense layer and MoE layers, with the features of a combination."""
    transport = values.get("exchange", "auto")
    moe = FLEX if transport == "local" else replace(FLEX, transport_backend=transport)
    if "recipe" in values:  # blocks have 4 elements
        moe = replace(moe, row_alignment=8)
    mixers = [tiny.attention()] * num_layers
    if "mla_up_proj" in values.get("recompute", "").split(","):
        mixers = [tiny_models.mla_config()] * num_layers
    if "mamba" in words:
        mixers[1] = tiny_models.LINEAR_ATTENTION["mamba"]
    feed_forwards: list[MoEConfig | None] = [None] + [moe] * (num_layers - 1)
    layers = [tiny_models.layer_config(*each) for each in zip(mixers, feed_forwards, strict=True)]
    config = tiny.model(layers=tuple(layers), mtp=MTPConfig(num_layers=1) if "mtp" in words else None)
    return tiny_models.with_streams_and_hash(config) if "streams" in words else config


def run_of(features: str) -> tuple[RunPlan, CudaGraphConfig]:
    """Returns the plan and the graph config of a tiny run with these features."""
    values = dict(each.split("=") for each in features.split() if "=" in each)
    words = set(features.split())
    stages = "pp" in words
    layout = "Et|t|t|tL" if "vpp" in words else "Ett|ttL"
    plan = tiny.plan(
        model=model_with(words, values, num_layers=4 if stages else 3 if "mamba" in words else 2),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=8 if stages else 4),
        pipeline=PipelineConfig(overlap="pairs" in words, delay_wgrad_compute="later" in words),
        memory=MemoryConfig(
            recompute=selective(*values["recompute"].split(",")) if "recompute" in values else selective(),
            offload=replace(
                ON_HOST,
                offload_modules=tuple(values["offload"].split(",")) if "offload" in values else (),
                delay_offload_until_cuda_graph="delayed" in words,
            ),
            paged_stash=STASH if "stash" in words else None,
        ),
    )
    if "gathers" in words:
        plan = replace(plan, data_parallel=OVERLAP)
    if "fsdp" in words:
        plan = replace(plan, data_parallel=replace(OVERLAP, fsdp=FSDPConfig()))
    if "recipe" in values:
        recipe, blocked = values["recipe"], {"blocks": 4}
        config = low_precision_config(recipe, **({} if recipe == "tensorwise" else blocked))
        plan = replace(plan, precision=replace(plan.precision, low_precision=config))
    if stages:
        plan = laid_out(plan, layout.replace("L", "mL") if "mtp" in words else layout, 2)
    changes = {axis: 2 for axis in ("ep", "tp", "cp") if axis in words}
    dense, experts = math.prod(changes.get(axis, 1) for axis in ("tp", "cp")), changes.get("ep", 1)
    parallel = replace(
        plan.parallel if stages else ParallelConfig(),
        world_size=(2 if stages else 1) * max(dense, experts),
        sequence_parallel="tp" in words,
        **changes,
    )
    names = values["graphs"]
    whole = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
    return replace(plan, parallel=parallel), whole if names == "full_iteration" else modules(*names.split(","))


@pytest.mark.parametrize("features", thinned(COMBINATIONS, 45), ids=str)
def test_replays_of_published_combinations_equal_eager_steps(features: str, deep_ep_stand_in: None) -> None:
    plan, graphs = run_of(features)
    check(plan, {features: graphs})
