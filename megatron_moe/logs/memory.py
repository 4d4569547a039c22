"""Memory of this rank: what the device allocator holds, or on a CPU what the process occupies."""

import resource
from pathlib import Path

import torch

MB = 2**20


def memory_line(rank: int, iteration: int, device: torch.device) -> str:
    """Megatron's memory line, in MB of 2^20 bytes. On a CPU: resident memory of the process."""
    figures = _device_figures(device) if device.type == "cuda" else _host_figures()
    fields = " | ".join(f"{name}: {size / MB:.2f}" for name, size in figures.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"


def memory_tags(device: torch.device) -> dict[str, float]:
    """Megatron's memory scalars of a GPU, in bytes; nothing on a CPU. Reads counters, waits for no kernel."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def _device_figures(device: torch.device) -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


def _host_figures() -> dict[str, int]:
    figures = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        figures["resident"] = int(statm.read_text().split()[1]) * resource.getpagesize()
    # Linux counts in units of 1024 bytes.
    figures["max resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return figures
