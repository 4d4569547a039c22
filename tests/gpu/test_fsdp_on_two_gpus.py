"""FSDP with NCCL: gathers and reductions run on separate streams without host-device synchronisation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.optim import unit_shards
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP64_LAYOUT
from tests.optim.test_fsdp import BUFFERS, ZERO_2, ZERO_3, plan, sharded, train

pytestmark = pytest.mark.gpu2

LIMIT_S = 120.0
CASES = ("plain", "microbatches", "expert parallel", "recomputed layers", "tied head and mtp")


COPIES = replace(BUFFERS, gathers_from_peers=True)
REDUCED = replace(BUFFERS, reduces_through_peers=True)
CONFIGS = {
    "zero-1": None,
    "zero-3": ZERO_3,
    "double-buffer": BUFFERS,
    "copies": COPIES,
    "reduced by copies": REDUCED,
    "all by copies": replace(ZERO_3, gathers_from_peers=True, reduces_through_peers=True),
    "zero-2": ZERO_2,
    "zero-2, reduced by copies": replace(ZERO_2, reduces_through_peers=True),
}


def every_config(context: ParallelContext, case: str) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """Trains with each sharding strategy; returns its results and its trace."""
    run, found = plan(case), {}
    for name, config in CONFIGS.items():
        wanted = run if config is None else sharded(run, config)
        here = ParallelContext.for_rank(
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
            assert any(event == "copy" for event, _ in trace) == (name in ("copies", "all by copies"))


def in_several_rounds(context: ParallelContext) -> list[dict[str, torch.Tensor]]:
    """Trains with NCCL and with receive buffers that are smaller than any shard; returns the results of both."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_shards, "MOST_RECEIVE_BYTES", 1024)
        for config in (BUFFERS, REDUCED):
            wanted = sharded(plan("microbatches"), config)
            here = ParallelContext.for_rank(
                replace(wanted.parallel, world_size=2), context.rank, device=context.device, handles=context.handles
            )
            found.append({key: value.cpu() for key, value in train(wanted, here)[0].items()})
    return found


def test_reductions_by_copies_in_several_rounds_equal_those_by_nccl() -> None:
    for by_nccl, by_copies in on_gpus(ParallelConfig(world_size=2), in_several_rounds, timeout=LIMIT_S):
        FP64_LAYOUT.check_all(by_copies, by_nccl, "losses, norms and weights")
