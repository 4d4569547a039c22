"""Report of an out-of-memory error: allocated memory, expected memory by category, and the most effective options."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_moe.config.exit_codes import MemoryProblem
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.planner.memory_advice import format_gib

REPORT = "crash/out-of-memory-{rank:05d}.txt"
_MOST_BLOCKS = 5
_TRACED_FRAMES = 3
_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Substring of the RuntimeError message with which torch's host allocator fails."""


@dataclass(frozen=True)
class DeviceMemory:
    """Statistics of the CUDA allocator, in bytes."""

    allocated: int
    """Memory of live tensors."""
    peak: int
    """Maximum of `allocated` since the start of the process."""
    reserved: int
    """Memory reserved from the device; `reserved - allocated` is free or fragmented."""
    total: int
    """Memory of the device."""
    blocks: tuple[tuple[int, str], ...] = ()
    """(bytes, recorded stack or "") of the largest blocks in use."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        return cls(
            allocated=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            total=torch.cuda.mem_get_info(device)[1],
            blocks=_largest_blocks(device),
        )

    def lines(self) -> Iterator[str]:
        """Formats the statistics as lines of the report."""
        unused = self.reserved - self.allocated
        advice = ", use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if unused > self.total / 10 else ""
        yield (
            f"allocated {format_gib(self.allocated)} (at most {format_gib(self.peak)}), reserved "
            f"{format_gib(self.reserved)} of {format_gib(self.total)}; "
            f"{format_gib(unused)} reserved and not allocated{advice}"
        )
        if self.blocks:
            yield "largest blocks in use: " + "; ".join(f"{format_gib(size)}{where}" for size, where in self.blocks)


@contextmanager
def report_out_of_memory(
    context: ParallelContext, run_dir: Path | None, advice: Callable[[str], Iterable[str]], iteration: int = 0
) -> Iterator[None]:
    """Context manager that converts out-of-memory errors of device and host into MemoryProblem with a report.

    Args:
        run_dir: run folder; the report is also written to its crash/. None means that the report is only in the
            exception.
        advice: returns lines about expected memory and remedies, given the name of the GPU ("" on a CPU).
        iteration: current iteration; 0 before the first one.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _NO_HOST_MEMORY not in str(error):
            raise
        on_gpu = context.device.type == "cuda"
        found = DeviceMemory.of(context.device) if on_gpu else None
        details = [*(found.lines() if found else ()), *advice(torch.cuda.get_device_name() if on_gpu else "")]
        path = None if run_dir is None else run_dir / REPORT.format(rank=context.rank)
        raise out_of_memory(error, iteration, details, path) from error


def out_of_memory(error: Exception, iteration: int, details: Iterable[str], path: Path | None) -> MemoryProblem:
    """Builds the error that ends the run, and writes its report to `path` if possible."""
    when = f"in iteration {iteration}" if iteration else "before the first iteration"
    lines = [f"out of memory {when}: {str(error).splitlines()[0] if str(error) else 'no details'}"]
    lines += [f"  {line}" for line in details]
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            lines.append(f"  also in {path}")
        except OSError:
            pass  # the exception already contains the report
    return MemoryProblem("\n".join(lines))


def _largest_blocks(device: torch.device) -> tuple[tuple[int, str], ...]:
    blocks = [
        (block["size"], block.get("frames", ()))
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    blocks.sort(key=lambda block: -block[0])
    return tuple((size, _stack(frames)) for size, frames in blocks[:_MOST_BLOCKS])


def _stack(frames: list[dict[str, object]]) -> str:
    """Innermost frames of an allocation as text; empty unless the allocator's history is recorded."""
    places = [f"{Path(str(frame['filename'])).name}:{frame['line']}" for frame in frames[:_TRACED_FRAMES]]
    return f"   allocated in {' < '.join(places)}" if places else ""
