"""Memory of CUDA graphs: cost model and emulation agree, and pools do not grow with the number of microbatches."""

from dataclasses import replace

import pytest
import torch

from arguments import plan_search, plan_settings
from arguments.dry_run.cluster import DEFAULT_GPU
from arguments.recipes import about_of_recipe
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.memory_emulation.rank import emulate_rank
from megatron_moe.memory_emulation.tracker import GRAPHS, Timeline
from tests.helpers.pipelines import laid_out
from tests.helpers.thinned import thinned
from tests.memory_emulation.test_agreement import REGISTRY, WITHIN, shallow

WHOLE = CudaGraphConfig(full_iteration=True)
GRAPH_KINDS = {
    "attention": CudaGraphConfig(cuda_graph_modules=("attn", "moe_router")),
    "layers": CudaGraphConfig(cuda_graph_modules=("attn", "mlp", "moe")),
    "whole step": WHOLE,
}


def cell(layout: str, graphs: CudaGraphConfig, num_layers: int = 4) -> RunPlan:
    """Builds a plan with Moonlight shapes and eight microbatches on two pipeline or four expert-parallel ranks."""
    plan = replace(
        shallow("m8", num_layers), memory=MemoryConfig(), emulation=EmulationConfig(), device="cpu", cuda_graphs=graphs
    )
    size = 8 * plan.batch.micro_batch_size
    if layout == "ep4":
        model = with_experts(plan.model, lambda moe: replace(moe, dispatcher="flex", expert_rank_capacity_factor=1.1))
        parallel = replace(plan.parallel, ep=4, world_size=4, ranks_per_host=4, shares_memory=True)
        batch = replace(plan.batch, global_batch_size=4 * size)
        return replace(plan, model=model, parallel=parallel, batch=batch)
    return laid_out(replace(plan, batch=replace(plan.batch, global_batch_size=size)), layout, 2)


def timeline(plan: RunPlan, rank: int = 0, num_microbatches: int | None = None) -> Timeline:
    return emulate_rank(plan, rank, torch.device("meta"), num_microbatches=num_microbatches).timeline


CELLS = [(layout, rank) for layout in ("Et*4|t*4L", "Et*2|t*2|t*2|t*2L") for rank in (0, 1)] + [("ep4", 0)]


@pytest.mark.parametrize(
    ("layout", "rank", "kind"), thinned([(*each, kind) for each in CELLS for kind in GRAPH_KINDS], step=4)
)
def test_closed_form_and_emulation_agree(layout: str, rank: int, kind: str) -> None:
    graphs, eager = (cell(layout, config, num_layers=8) for config in (GRAPH_KINDS[kind], CudaGraphConfig()))
    peak, closed = timeline(graphs, rank).peak(), RankMemory(graphs).of_rank(rank)
    assert abs(peak.total / closed.total - 1) < WITHIN
    more = peak.total - timeline(eager, rank).peak().total
    expected = closed.total - RankMemory(eager).of_rank(rank).total
    assert abs(more - expected) < 0.06 * peak.categories[GRAPHS], (more, expected)


@pytest.mark.slow
def test_deferred_weight_gradients_keep_their_operands() -> None:
    """Graphs of overlapped microbatches keep operands for deferred weight gradients, in a recipe without a pipeline."""
    recipe = "qwen3-235b-a22b-b300-128"
    wanted = about_of_recipe(recipe, REGISTRY)
    settings = plan_search.settings_of(["--recipe", recipe], REGISTRY)
    plan = plan_settings.plan_as_given(settings, GPUS[wanted.gpu or DEFAULT_GPU], wanted.gpus)
    plan = replace(plan, emulation=EmulationConfig(), device="cpu")
    assert plan.pipeline.delay_wgrad_compute and plan.cuda_graphs.cuda_graph_modules
    peak, closed = timeline(plan).peak(), RankMemory(plan).of_rank(0)
    assert peak.categories[GRAPHS] > 0.3 * peak.total
    assert abs(peak.total / closed.total - 1) < WITHIN


@pytest.mark.parametrize(("layout", "few"), [("Et*4|t*4L", 2), ("Et*2|t*2|t*2|t*2L", 4)])
@pytest.mark.parametrize("kind", thinned(["layers", "attention"]))
def test_pools_do_not_grow_with_microbatches(layout: str, few: int, kind: str) -> None:
    """Further microbatches replay existing graphs, because the number of microbatches in flight does not increase."""
    plan = cell(layout, GRAPH_KINDS[kind], num_layers=8)
    at_few, at_many = (timeline(plan, 0, number).pool_bytes() for number in (few, 8))
    assert 0 < at_many <= 1.05 * at_few


def test_pool_of_a_whole_step_stays_during_the_update() -> None:
    """The graph pool stays allocated when offloaded optimizer state returns to the device for the update."""
    plan = cell("Et*2|t*2L", WHOLE)
    found = timeline(plan)
    assert found.breakdown_at(found.num_events - 1).categories[GRAPHS] == found.peak().categories[GRAPHS] > 0
    memory = replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=1.0))
    optimizer = replace(plan.optimizer, offload=OptimizerOffloadConfig(fraction=1.0, cpu_step=False))
    plan = replace(plan, memory=memory, optimizer=optimizer)
    captured, eager = (RankMemory(replace(plan, cuda_graphs=each)).of_rank(0) for each in (WHOLE, CudaGraphConfig()))
    training = captured.total - captured.state.total - captured.staging
    assert captured.total - eager.total == min(captured.staging, training) > 0
