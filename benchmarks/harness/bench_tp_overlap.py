"""Times tensor-parallel linear layers with overlapped communication and compares them with torch's fused ops.

    python benchmarks/harness/bench_tp_overlap.py [--gpus 2] [--output-dir benchmarks]

Writes `<date>-<machine>-tp-overlap.md`: microseconds of gather + GEMM and GEMM + scatter (median of the slowest rank)
for NCCL collectives, the copies of `--tp-comm-overlap`, `torch.ops.symm_mem.fused_all_gather_matmul` and
`fused_matmul_reduce_scatter` (without multicast), and the GEMM alone. All results are compared with those of NCCL.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.bench_dispatch import REPEATS, WARMUP, slowest, start_together  # noqa: E402
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo  # noqa: E402
from megatron_moe.config.run import KernelConfig  # noqa: E402
from megatron_moe.kernels import autograd  # noqa: E402
from megatron_moe.kernels.ops import Kernels  # noqa: E402
from megatron_moe.kernels.registry import select_kernels  # noqa: E402
from megatron_moe.parallel.context import ParallelContext  # noqa: E402
from megatron_moe.parallel.sequence_shards import LayerCollectives, PeerShards, SequenceCollectives  # noqa: E402


@dataclass(frozen=True)
class LinearShape:
    """Global sizes of a linear layer; a rank holds 1 / tp of its weight."""

    name: str
    kind: Literal["gather", "scatter"]
    """Whether the layer is column-parallel and gathers its input, or row-parallel and scatters its output."""
    inputs: int
    outputs: int
    rows: int = 8192


SHAPES = (
    LinearShape("M27 q, kv", "gather", 2048, 3072),
    LinearShape("M27 projection", "scatter", 2048, 2048),
    LinearShape("M27 fc1", "gather", 2048, 2 * 11264),
    LinearShape("M27 fc2", "scatter", 11264, 2048),
    LinearShape("H4096 fc1", "gather", 4096, 2 * 14336),
    LinearShape("H4096 fc2", "scatter", 14336, 4096),
    LinearShape("H8192 fc1", "gather", 8192, 2 * 28672),
    LinearShape("H8192 fc2", "scatter", 28672, 8192),
)


def largest_shard(shape: LinearShape, num_ranks: int, dtype: torch.dtype) -> int:
    """Bytes of the shard that a rank gathers or scatters."""
    width = shape.inputs if shape.kind == "gather" else shape.outputs
    return shape.rows // num_ranks * width * dtype.itemsize


def methods(
    shape: LinearShape, ctx: ParallelContext, kernels: Kernels, peers: PeerShards
) -> dict[str, Callable[[], Tensor]]:
    """Maps each method to a function that computes the layer's output on this rank. `peers` has buffers for the shard
    of the shape."""
    tp = ctx.group("tp")
    draw = torch.Generator(ctx.device).manual_seed(ctx.rank)
    random = partial(torch.randn, device=ctx.device, dtype=ctx.dtype, generator=draw)
    collectives = {"NCCL": SequenceCollectives(tp), "--tp-comm-overlap": peers}
    layers = {name: LayerCollectives(each, each, each) for name, each in collectives.items()}
    assert tp.handle is not None, "a group of several ranks"
    group = tp.handle.group_name
    symm_mem.enable_symm_mem_for_group(group)
    if shape.kind == "gather":
        x, weight = random(shape.rows // tp.size, shape.inputs), random(shape.outputs // tp.size, shape.inputs)
        whole = random(shape.rows, shape.inputs)
        return {
            **{name: partial(_gathered, kernels, x, weight, layer) for name, layer in layers.items()},
            "torch": lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.T], 0, group)[1][0],
            "GEMM alone": lambda: kernels.linear_forward(whole, weight, None),
        }
    x, weight = random(shape.rows, shape.inputs // tp.size), random(shape.outputs, shape.inputs // tp.size)
    return {
        **{name: partial(autograd.linear_to_shard, kernels, x, weight, layer) for name, layer in layers.items()},
        "torch": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, group),
        "GEMM alone": lambda: kernels.linear_forward(x, weight, None),
    }


def _gathered(kernels: Kernels, x: Tensor, weight: Tensor, layer: LayerCollectives) -> Tensor:
    return autograd.linears_of_shard(kernels, x, layer, (weight, None))[0]


def largest_errors(run: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Largest error of each method relative to the largest value of NCCL's result. The GEMM alone has no result."""
    expected = run["NCCL"]().double()
    results = {name: method().double() for name, method in run.items() if name != "GEMM alone"}
    return {name: float((out - expected).abs().max() / expected.abs().max()) for name, out in results.items()}


def microseconds(method: Callable[[], Tensor], ctx: ParallelContext) -> float:
    """Median over repetitions; the ranks start each one together."""
    times = []
    for _ in range(WARMUP + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_together(ctx)
        begin.record()
        method()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return slowest(statistics.median(times[WARMUP:]), ctx)


def row(shape: LinearShape, times: dict[str, float], errors: dict[str, float]) -> str:
    """Formats one row of the table."""
    best = times["torch"] / times["--tp-comm-overlap"]
    error = max(errors.values())
    return f"| {shape.name} | {' | '.join(f'{us:.0f}' for us in times.values())} | {best:.2f} | {error:.1e} |"


@torch.no_grad()
def measure(ctx: ParallelContext, write: Callable[[str], None]) -> None:
    kernels, tp = select_kernels(KernelConfig(), ctx.device, ctx.dtype), ctx.group("tp").size
    slot_bytes = max(largest_shard(shape, tp, ctx.dtype) for shape in SHAPES)
    peers = PeerShards(slot_bytes, ctx, kernels.sum_contributions_)
    for number, shape in enumerate(SHAPES):
        run = methods(shape, ctx, kernels, peers)
        if number == 0:
            write(f"\n| layer, {shape.rows} rows | {' | '.join(run)} | torch / ours | largest error |")
            write(f"|---|{'---|' * (len(run) + 2)}")
        errors = {name: slowest(error, ctx) for name, error in largest_errors(run).items()}
        write(row(shape, {name: microseconds(method, ctx) for name, method in run.items()}, errors))


def rank_main(rank: int, num_gpus: int, port: int, path: str) -> None:
    launch = ProcessInfo(rank=rank, world_size=num_gpus, local_rank=rank, local_world_size=num_gpus, master_port=port)
    config = ParallelConfig(world_size=num_gpus, tp=num_gpus, sequence_parallel=True)
    ctx = ParallelContext.start(config, launch, device="cuda", dtype="bf16")
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if ctx.is_first:
            print(line, flush=True)
            Path(path).write_text("\n".join(lines) + "\n")

    machine = f"{num_gpus} x {torch.cuda.get_device_name()}"
    write(f"# Linear layers with tensor-parallel communication on {machine}, {date.today()}")
    write(f"\n`python benchmarks/harness/bench_tp_overlap.py --gpus {num_gpus}`, torch {torch.__version__}, in us")
    measure(ctx, write)
    ctx.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--port", type=int, default=29556)
    arguments = parser.parse_args()
    if arguments.gpus < 2 or torch.cuda.device_count() < arguments.gpus:
        raise SystemExit(f"torch finds {torch.cuda.device_count()} GPUs here; this tool needs two or more.")
    machine = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    path = arguments.output_dir / f"{date.today()}-{arguments.gpus}x{machine}-tp-overlap.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    mp.spawn(rank_main, args=(arguments.gpus, arguments.port, str(path)), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
