"""Report of an out-of-memory error: allocated memory, expected memory by category, and the most effective options.

Expected memory is the closed form of `cost_model/memory.py` for this pipeline stage, as in a dry run. Options are the
three memory options that save most, with their cost in step time by the cost model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_moe.config.exit_codes import MemoryProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU, GPUS
from megatron_moe.cost_model.memory import RankBytes, RankMemory
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.planner.memory_options import MemoryOption, more_switches, saved
from megatron_moe.planner.search import Planner

REPORT = "crash/out-of-memory-{rank:05d}.txt"
_MOST_SWITCHES = 3
_MOST_BLOCKS = 5
_TRACED_FRAMES = 3
_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Part of the RuntimeError of torch's host allocator."""


@dataclass(frozen=True)
class DeviceMemory:
    """Statistics of the CUDA allocator, in bytes."""

    allocated: int
    """Memory of live tensors."""
    peak: int
    """Maximum of `allocated`."""
    reserved: int
    """Memory taken from the device; `reserved - allocated` is free or fragmented."""
    total: int
    """Memory of the device."""
    blocks: tuple[tuple[int, str], ...] = ()
    """(bytes, recorded stack or "") of the largest blocks in use."""


def device_memory(device: torch.device) -> DeviceMemory:
    assert device.type == "cuda", f"{device} has no CUDA allocator"
    _, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        total=total,
        blocks=_largest_blocks(device),
    )


@contextmanager
def room_asked_for(plan: RunPlan, context: ParallelContext, iteration: int) -> Iterator[None]:
    """Context manager that converts out-of-memory errors of device and host into MemoryProblem with a report.

    `iteration`: 0 before the first iteration.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _NO_HOST_MEMORY not in str(error):
            raise
        found = device_memory(context.device) if context.device.type == "cuda" else None
        raise out_of_memory(plan, context.group("pp").rank, iteration, error, found) from error


def out_of_memory(
    plan: RunPlan, pipeline_rank: int, iteration: int, error: Exception, found: DeviceMemory | None
) -> MemoryProblem:
    """Builds the error that ends the run, and writes its report to the run folder's crash/ if possible.

    `found`: statistics of the CUDA allocator; None on a CPU.
    """
    rank = plan.launch.rank
    when = f"in iteration {iteration}" if iteration else "before the first iteration"
    lines = [f"out of memory {when}: {str(error).splitlines()[0] if str(error) else 'no details'}"]
    lines += [f"  {line}" for line in report(plan, pipeline_rank, found)]
    if plan.logging.run_dir is not None and _written(plan.logging.run_dir / REPORT.format(rank=rank), lines):
        lines.append(f"  also in {plan.logging.run_dir / REPORT.format(rank=rank)}")
    return MemoryProblem("\n".join(lines))


def report(plan: RunPlan, pipeline_rank: int, found: DeviceMemory | None) -> Iterator[str]:
    """Lines about allocated memory, expected memory and memory options."""
    if found is not None:
        yield from _found(found)
    count = plan.batch.global_batch_size // (plan.batch.micro_batch_size * plan.parallel.dp)
    expected = RankMemory(plan).of_rank(pipeline_rank, count)
    yield from _expected(expected)
    switches = helpful(plan, pipeline_rank, count)
    if switches:
        yield "the memory options that would save most:"
    for switch, gain, price in switches:
        yield f"  {switch.flags}: {_gib(gain)} less, step time {price:+.1%} by the cost model"
    yield "or a smaller --micro-batch-size or --seq-length, or more GPUs; tools/plan.py searches layouts that fit"


def helpful(plan: RunPlan, pipeline_rank: int, num_microbatches: int) -> list[tuple[MemoryOption, float, float]]:
    """(option, bytes saved on this rank, relative increase of the step time) of the options that save most."""
    options = [(switch, saved(plan, switch, pipeline_rank, num_microbatches)) for switch in more_switches(plan)]
    best = sorted((each for each in options if each[1] > 0), key=lambda each: -each[1])[:_MOST_SWITCHES]
    planner = Planner(_gpu())
    before = planner.estimator(plan).step().total
    return [(switch, gain, planner.estimator(switch.apply(plan)).step().total / before - 1) for switch, gain in best]


def _found(found: DeviceMemory) -> Iterator[str]:
    pieces = found.reserved - found.allocated
    yield (
        f"allocated {_gib(found.allocated)} (at most {_gib(found.peak)}), reserved {_gib(found.reserved)} of "
        f"{_gib(found.total)}; {_gib(pieces)} reserved and not allocated"
        + (", which expandable segments would join (PYTORCH_CUDA_ALLOC_CONF)" if pieces > found.total / 10 else "")
    )
    if found.blocks:
        yield "largest blocks in use: " + "; ".join(f"{_gib(size)}{where}" for size, where in found.blocks)


def _expected(rank: RankBytes) -> Iterator[str]:
    rows = [*vars(rank.state).items(), *((f"activations of {name}", size) for name, size in rank.activations)]
    rows += [("dispatch buffers", rank.dispatch), ("workspace of the current layer", rank.working)]
    rows += [("pipeline buffers", rank.transfers)]
    yield f"expected on pipeline rank {rank.rank}: {_gib(rank.total)} without CUDA, NCCL and library workspaces:"
    listed = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])
    yield "  " + ", ".join(f"{name} {_gib(size)}" for name, size in listed)


def _gpu() -> GPU:
    """GPU of this machine, or an H100 if the cost model does not have it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = [gpu for gpu in GPUS.values() if gpu.name in name.split()]
    return known[0] if known else GPUS["h100"]


def _largest_blocks(device: torch.device) -> tuple[tuple[int, str], ...]:
    blocks = [
        (block["size"], block.get("frames", ()))
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    blocks.sort(key=lambda block: -block[0])
    return tuple((size, _where(frames)) for size, frames in blocks[:_MOST_BLOCKS])


def _where(frames: list[dict[str, object]]) -> str:
    """Allocation stack; empty unless the allocator's history is recorded."""
    places = [f"{Path(str(frame['filename'])).name}:{frame['line']}" for frame in frames[:_TRACED_FRAMES]]
    return f" from {' < '.join(places)}" if places else ""


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def _written(path: Path, lines: list[str]) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError:
        return False
    return True
