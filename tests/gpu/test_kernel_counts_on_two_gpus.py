"""Kernels that a rank launches per layer and microbatch where ranks share a sequence, counted by the profiler."""

import json
import os
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from benchmarks.harness.timed_run import TimedRun, kind_of, plan_to_run, traced_steps
from tests.benchmarks.test_count_kernels import EP2, LAYOUTS
from tests.helpers.ranks import free_port

pytestmark = pytest.mark.gpu2

SMALL = "--seq-length 1024 --vocab-size 8192 --micro-batch-size 1 --global-batch-size 8"
FEW, MANY = 2, 4
"""Layers of the compared models."""
MOST = 1.3
"""Kernels relative to expert parallelism; library functions that count as one launch on the CPU have several."""


def kernels_of_a_step(flags: str, num_layers: int) -> tuple[int, int]:
    """(Kernels of a step, microbatches of this rank)."""
    plan = plan_to_run(f"{flags} --num-layers {num_layers} --moe-layer-freq ([0]*1+[1]*{num_layers - 1})".split())
    run = TimedRun(plan, quick=True)
    try:
        for _ in range(2):
            run.step()
        kernels = traced_steps(run, 1, None)
    finally:
        run.close()
    # the optimizer's kernels depend on the number of parameters
    return sum(kind_of(each.name) != "optimizer" for each in kernels), plan.num_microbatches


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = {}
    for name, flags in {"ep2": "", **LAYOUTS}.items():
        few, many = (kernels_of_a_step(f"{EP2} {SMALL} {flags}", number) for number in (FEW, MANY))
        found[name] = (many[0] - few[0]) / (MANY - FEW) / many[1]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def test_ranks_that_share_a_sequence_launch_little_more_than_ranks_that_do_not(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        print(f"rank {rank}: kernels per layer and microbatch {found}")
        assert all(number <= MOST * found["ep2"] for number in found.values()), found
