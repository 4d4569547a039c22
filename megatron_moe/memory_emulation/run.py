"""Memory emulation of the requested ranks (`--fake-init-process-group`)."""

import gc
import json

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.logs.plots import draw_memory
from megatron_moe.memory_emulation.rank import EmulatedRun, emulate_rank
from megatron_moe.memory_emulation.report import facts_of, report
from megatron_moe.parallel.grid import all_groups

_POINTS = 1500
"""Number of points of the timeline plot."""


def emulate(plan: RunPlan) -> str:
    """Returns the table; writes facts and plot to the paths of the plan.

    Raises RunError for what cannot be emulated.
    """
    config = plan.emulation
    assert config is not None, "the plan has no emulation"
    device = _device(plan)
    # the first rank of every pipeline stage
    ranks = config.ranks or tuple(all_groups(plan.parallel)["pp"][0])
    played = []
    for rank in ranks:
        played.append(emulate_rank(plan, rank, device))
        gc.collect()
    facts = facts_of(plan, GPUS[config.gpu], played, real=device.type == "cuda")
    try:
        if config.emulate_json is not None:
            config.emulate_json.write_text(json.dumps(facts, indent=2) + "\n")
        if config.emulate_plot is not None:
            draw_memory({_title(each): each.timeline.curves(_POINTS)[1] for each in played}, config.emulate_plot)
    except OSError as trouble:
        raise EnvironmentProblem(f"the emulation's results could not be written: {trouble}") from trouble
    return report(facts)


def _title(played: EmulatedRun) -> str:
    return f"rank {played.rank}, pipeline rank {played.pipeline_rank}"


def _device(plan: RunPlan) -> torch.device:
    """Device of the emulation: a GPU if available and not declined, else `meta`."""
    if plan.device == "cpu" or not torch.cuda.is_available():
        if plan.device == "cuda":
            raise EnvironmentProblem("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
        return torch.device("meta")
    kinds = {
        kind
        for layer in plan.model.layers
        if isinstance(layer.feed_forward, MoEConfig)
        for kind in layer.feed_forward.router.balancing
    }
    if "sinkhorn" in kinds and plan.parallel.ep > 1:
        raise EnvironmentProblem(
            "on a GPU the choices of sinkhorn balancing are its own, and not those that an emulation assumes of all "
            "ranks; emulate with --device cpu"
        )
    return torch.device("cuda", 0)
