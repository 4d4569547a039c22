"""Advice after an out-of-memory error: expected memory of a pipeline rank, and the options that save the most."""

from collections.abc import Iterator

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPUS
from megatron_moe.cost_model.memory import RankBytes, RankMemory
from megatron_moe.planner.memory_options import MemoryOption, bytes_saved, disabled_options
from megatron_moe.planner.search import Planner

_MOST_OPTIONS = 3


def memory_advice(plan: RunPlan, pipeline_rank: int, device_name: str) -> Iterator[str]:
    """Yields lines for an out-of-memory error: expected memory by category, as in a dry run, and ways to save memory.

    `device_name`: GPU name reported by CUDA, for step time estimates. An H100 is assumed for an unknown GPU.
    """
    yield from _expected(RankMemory(plan).of_rank(pipeline_rank))
    options = best_options(plan, pipeline_rank, device_name)
    if options:
        yield "memory options that would save the most:"
    for option, gain, slowdown in options:
        yield f"  {option.flags}: saves {format_gib(gain)}, estimated step time {slowdown:+.1%}"
    yield "otherwise reduce --micro-batch-size or --seq-length, or use more GPUs; tools/plan.py finds layouts that fit"


def best_options(plan: RunPlan, pipeline_rank: int, device_name: str = "") -> list[tuple[MemoryOption, float, float]]:
    """Options that save the most memory, as tuples (option, bytes saved on this rank, relative change of step time)."""
    options = [(option, bytes_saved(plan, option, pipeline_rank)) for option in disabled_options(plan)]
    best = sorted((each for each in options if each[1] > 0), key=lambda each: -each[1])[:_MOST_OPTIONS]
    gpu = next((gpu for gpu in GPUS.values() if gpu.name in device_name.split()), GPUS["h100"])
    planner = Planner(gpu)
    before = planner.estimator(plan).step().total
    return [(option, gain, planner.estimator(option.apply(plan)).step().total / before - 1) for option, gain in best]


def format_gib(size: float) -> str:
    """Formats a number of bytes in GiB, or in MiB below 0.01 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def _expected(rank: RankBytes) -> Iterator[str]:
    rows = [*vars(rank.state).items(), *((f"activations of {name}", size) for name, size in rank.activations)]
    rows += [("dispatch buffers", rank.dispatch), ("workspace of the current layer", rank.workspace)]
    rows += [("dispatch receive slots", rank.receive_slots), ("pipeline buffers", rank.transfers)]
    rows += [("graph pools", rank.graphs), ("tensor-parallel slots", rank.sequence_slots)]
    rows += [("context-parallel slots", rank.context_slots)]
    total = format_gib(rank.total)
    yield f"expected on pipeline rank {rank.rank}: {total} without CUDA, NCCL and library workspaces, of which"
    listed = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])
    yield "  " + ", ".join(f"{name} {format_gib(size)}" for name, size in listed)
