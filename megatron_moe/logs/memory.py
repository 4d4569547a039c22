"""Memory of this rank: what the device allocator holds, or on a CPU what the process occupies."""

import os
import resource
from pathlib import Path

import torch

MB = 2**20


def memory_line(rank: int, iteration: int, device: torch.device, *, whole_device: bool = False) -> str:
    """Megatron's memory line, in MB of 2^20 bytes. On a CPU: resident memory of the process.

    `whole_device`: also what all processes occupy, by the driver's count; on a CPU, of the host.
    """
    figures = _device_figures(device) if device.type == "cuda" else _host_figures()
    if whole_device:
        figures["used on the device"] = _occupied(device)
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


def _occupied(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    free, total = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
    return (total - free) * resource.getpagesize()


def _host_figures() -> dict[str, int]:
    figures = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        figures["resident"] = int(statm.read_text().split()[1]) * resource.getpagesize()
    # Linux counts in units of 1024 bytes.
    figures["max resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return figures
