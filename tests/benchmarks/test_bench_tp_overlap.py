"""The compared linear layers compute the same on CPU ranks, where torch's fused ops use collectives."""

import pytest
import torch
from torch.distributed import _symmetric_memory as symm_mem

from benchmarks.harness import bench_tp_overlap
from benchmarks.harness.bench_tp_overlap import LinearShape, largest_errors, largest_shard, methods, row
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sequence_shards import PeerShards
from tests.helpers.ranks import on_processes
from tests.helpers.tolerances import FP64_LAYOUT

SMALL = (LinearShape("fc1", "gather", 6, 8, rows=4), LinearShape("fc2", "scatter", 8, 6, rows=4))


def errors_of(ctx: ParallelContext) -> list[dict[str, float]]:
    kernels = reference.bundle()
    slot_bytes = max(largest_shard(shape, ctx.group("tp").size, ctx.dtype) for shape in SMALL)
    peers = PeerShards(-(-slot_bytes // 512) * 512, ctx, kernels.sum_contributions_)
    library = torch.library.Library("symm_mem", "IMPL")  # torch registers the fallbacks for meta tensors only
    with symm_mem._test_mode():
        library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, "CPU")
        return [largest_errors(methods(shape, ctx, kernels, peers)) for shape in SMALL]


@pytest.mark.filterwarnings("ignore")
def test_all_methods_compute_the_same_layer() -> None:
    for found in on_processes(ParallelConfig(world_size=2, tp=2, sequence_parallel=True), errors_of):
        for errors in found:
            assert set(errors) == {"NCCL", "--tp-comm-overlap", "torch"}
            assert max(errors.values()) < FP64_LAYOUT.rtol


def test_a_row_has_all_times_and_the_ratio_to_torch() -> None:
    times = {"NCCL": 100.0, "--tp-comm-overlap": 50.0, "torch": 60.0, "GEMM alone": 40.0}
    assert row(SMALL[0], times, {"torch": 1e-3}) == "| fc1 | 100 | 50 | 60 | 40 | 1.20 | 1.0e-03 |"
    assert {shape.kind for shape in bench_tp_overlap.SHAPES} == {"gather", "scatter"}
