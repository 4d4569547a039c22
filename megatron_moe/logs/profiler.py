"""Profiling of selected steps, NVTX ranges for modules, and CUDA memory snapshots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.logging import ProfileConfig
from megatron_moe.parallel.context import ParallelContext

FOLDER = "profile"
MARKED = ("embedding", "self_attention", "mlp", "router", "experts", "shared_experts", "output_layer")
"""Module names that get a profiler range, at any depth of the model."""
_MOST_ALLOCATIONS = 1_000_000
"""Number of allocations kept for a snapshot, some hundred bytes each."""


class StepProfile:
    """Profiles the configured steps; `enter` observes `train.events.RunEvents`.

    Files go to `profile/` in the run folder: traces `rank-N.json.gz` for chrome://tracing or Perfetto, and memory
    snapshots for https://pytorch.org/memory_viz.
    """

    def __init__(
        self, config: ProfileConfig, context: ParallelContext, run_dir: Path | None, log_interval: int
    ) -> None:
        """Starts recording the memory history if requested.

        Raises EnvironmentProblem if a requested feature needs a GPU and the run is on a CPU.
        """
        self._config = config
        self._folder = run_dir / FOLDER if run_dir else Path(FOLDER)
        self._rank = context.rank
        self._log_interval = log_interval
        self._profiler: profile | None = None
        self._marking = False
        """True while an external profiler is started."""
        self._wanted = config.tool != "none" and (not config.profile_ranks or context.rank in config.profile_ranks)
        on_gpu = context.device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if not on_gpu and config.tool == "cuda":
            raise EnvironmentProblem(
                "--profile marks steps for an external GPU profiler, and this run is on a CPU; "
                "use --use-pytorch-profiler, which writes a trace on a CPU as well"
            )
        if not on_gpu and config.memory_snapshot:
            raise EnvironmentProblem(
                "--record-memory-history records the history of the CUDA allocator, and this run is on a CPU; remove it"
            )
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def enter(self, phase: str, iteration: int) -> None:
        """Starts or stops profiling when a phase begins; `iteration` of phase "step" is the one that begins."""
        done = iteration - 1 if phase == "step" else iteration
        if self._profiling and (phase != "step" or done >= self._config.profile_step_end):
            self._stop()
        elif (
            phase == "step" and self._wanted and self._config.profile_step_start <= done < self._config.profile_step_end
        ):
            self._start()
        if phase == "step" and done and done % self._log_interval == 0:
            self._write_snapshot()

    def close(self) -> None:
        """Writes the trace and the snapshot of a run that ends."""
        if self._profiling:
            self._stop()
        self._write_snapshot()

    @property
    def _profiling(self) -> bool:
        return self._marking or self._profiler is not None

    def _start(self) -> None:
        if self._profiling:
            return
        if self._config.tool == "cuda":
            torch.cuda.profiler.start()
            self._marking = True
            return
        self._profiler = profile(
            activities=self._activities,
            record_shapes=self._config.pytorch_profiler_collect_shapes,
            with_stack=self._config.pytorch_profiler_collect_callstack,
        )
        self._profiler.start()

    def _stop(self) -> None:
        if self._marking:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self._marking = False
        if self._profiler is not None:
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
            self._profiler = None
        self._wanted = False

    def _write_snapshot(self) -> None:
        if self._config.memory_snapshot:
            path = snapshot_path(self._folder, self._config.memory_snapshot, self._rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))


def snapshot_path(folder: Path, name: str, rank: int) -> Path:
    """Megatron's file name of a rank's snapshot; a relative name is resolved against `folder`."""
    path = folder / name
    return path.with_name(f"{path.stem}_{rank}{path.suffix}")


def mark_parts(model: nn.Module, device: torch.device) -> None:
    """Adds profiler ranges (NVTX on a GPU) named after the modules to the forwards of `MARKED` modules."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in MARKED:
            before, after = _range_hooks(name, nvtx=device.type == "cuda")
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)


def _range_hooks(name: str, *, nvtx: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    open_ranges: list[Any] = []

    def before(*_: object) -> None:
        opened = record_function(name)
        opened.__enter__()
        open_ranges.append(opened)
        if nvtx:
            torch.cuda.nvtx.range_push(name)

    def after(*_: object) -> None:
        if nvtx:
            torch.cuda.nvtx.range_pop()
        open_ranges.pop().__exit__(None, None, None)

    return before, after
