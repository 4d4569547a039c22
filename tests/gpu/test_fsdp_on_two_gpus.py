"""FSDP with NCCL: gathers and reductions run on separate streams without host-device synchronisation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP64_LAYOUT
from tests.optim.test_fsdp import BUFFERS, ZERO_2, ZERO_3, plan, sharded, train

pytestmark = pytest.mark.gpu2

LIMIT_S = 120.0
CASES = ("plain", "microbatches", "expert parallel", "recomputed layers", "tied head and mtp")


COPIES = replace(BUFFERS, gathers_from_peers=True)
CONFIGS = {"zero-1": None, "zero-3": ZERO_3, "double-buffer": BUFFERS, "copies": COPIES, "zero-2": ZERO_2}


def every_config(context: ParallelContext, case: str) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """Trains with each sharding strategy; returns its results and its trace."""
    run, found = plan(case), {}
    for name, config in CONFIGS.items():
        wanted = run if config is None else sharded(run, config)
        here = ParallelContext.within(
            replace(wanted.parallel, world_size=2), context.rank, device=context.device, handles=context.handles
        )
        figures, trace = train(wanted, here)
        found[name] = {key: value.cpu() for key, value in figures.items()}, trace
    return found


@pytest.mark.parametrize("case", CASES)
def test_sharded_units_give_the_results_of_zero_1_under_nccl(case: str) -> None:
    for rank, found in enumerate(on_gpus(ParallelConfig(world_size=2), every_config, case, timeout=LIMIT_S)):
        for name, (figures, trace) in found.items():
            FP64_LAYOUT.check_all(figures, found["zero-1"][0], f"rank {rank}, {case}, {name}")
            assert bool(trace) == (name != "zero-1")
            assert any(event == "copy" for event, _ in trace) == (name == "copies")
