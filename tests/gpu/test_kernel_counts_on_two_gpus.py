"""Kernel launches per layer and microbatch with tensor and context parallelism, counted by the profiler."""

from functools import cache

import pytest

from benchmarks.harness.timed_run import kind_of, traced_steps
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.benchmarks.test_count_kernels import EP2, LAYOUTS
from tests.gpu.shared_group import run_within
from tests.helpers.ranks import on_gpus

pytestmark = pytest.mark.gpu2

SMALL = "--seq-length 1024 --vocab-size 8192 --micro-batch-size 1 --global-batch-size 8"
FEW, MANY = 2, 4
"""Numbers of layers of the compared models."""
MOST = 1.3
"""Maximum number of kernels relative to expert parallelism; some library functions launch several kernels."""


LIMIT_S = 240.0


def kernels_of_a_step(context: ParallelContext, flags: str, num_layers: int) -> tuple[int, int]:
    """Traces a step; returns (number of its kernels, number of microbatches on this rank)."""
    layers = f"--num-layers {num_layers} --moe-layer-freq ([0]*1+[1]*{num_layers - 1})"
    run = run_within(context, f"{flags} {layers}".split())
    try:
        for _ in range(2):
            run.step()
        kernels = traced_steps(run, 1, None)
    finally:
        run.close()
    # the optimizer's kernels depend on the number of parameters
    return sum(kind_of(each.name) != "optimizer" for each in kernels), run.plan.num_microbatches


def kernels_per_layer(context: ParallelContext, flags: str) -> float:
    """Number of kernels per layer and microbatch."""
    few, many = (kernels_of_a_step(context, f"{EP2} {SMALL} {flags}", number) for number in (FEW, MANY))
    return (many[0] - few[0]) / (MANY - FEW) / many[1]


@cache
def on_ranks(flags: str) -> list[float]:
    return on_gpus(ParallelConfig(world_size=2), kernels_per_layer, flags, timeout=LIMIT_S)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_sequence_launch_little_more_than_ranks_that_do_not(layout: str) -> None:
    for rank, (found, expected) in enumerate(zip(on_ranks(LAYOUTS[layout]), on_ranks(""), strict=True)):
        print(f"rank {rank}: {found:.1f} kernels per layer and microbatch, {expected:.1f} without {layout}")
        assert found <= MOST * expected
