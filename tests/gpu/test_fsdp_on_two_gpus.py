"""Sharded gradients and weights of units under NCCL: gathers and reductions on their own streams, no host waits."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import free_port
from tests.helpers.tolerances import FP64_LAYOUT
from tests.optim.test_fsdp import BUFFERS, ZERO_2, ZERO_3, plan, sharded, train

pytestmark = pytest.mark.gpu2

CASES = ("plain", "microbatches", "expert parallel", "recomputed layers", "tied head and mtp")


def rank_main(rank: int, port: int, folder: str) -> None:
    launch = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
    found, context = {}, None
    for case in CASES:
        run = plan(case)
        for name, config in {"zero-1": None, "zero-3": ZERO_3, "double-buffer": BUFFERS, "zero-2": ZERO_2}.items():
            wanted = run if config is None else sharded(run, config)
            if context is None:
                context = ParallelContext.start(wanted.parallel, launch, device="cuda", dtype="fp64")
            here = ParallelContext.within(
                replace(wanted.parallel, world_size=2), rank, device=context.device, handles=context.handles
            )
            figures, trace = train(wanted, here)
            found[case, name] = {key: value.cpu() for key, value in figures.items()}, trace
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    assert context is not None
    context.stop()


def test_sharded_units_give_the_results_of_zero_1_under_nccl(tmp_path: Path) -> None:
    mp.spawn(rank_main, (free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = pickle.loads(Path(tmp_path, f"{rank}.pickle").read_bytes())
        for (case, name), (figures, trace) in found.items():
            FP64_LAYOUT.check_all(figures, found[case, "zero-1"][0], f"rank {rank}, {case}, {name}")
            assert bool(trace) == (name != "zero-1")
