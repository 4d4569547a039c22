"""Profiling of selected steps, NVTX ranges for modules, and CUDA memory snapshots."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.logging import ProfileConfig
from megatron_moe.logs.writers import Guard
from megatron_moe.parallel.context import ParallelContext

FOLDER = "profile"
MARKED = ("embedding", "self_attention", "mlp", "router", "experts", "shared_experts", "output_layer")
"""Modules that get a profiler range, given by the last component of their name, such as "mlp" for "layers.0.mlp"."""
_MOST_ALLOCATIONS = 1_000_000
"""Maximum number of allocations recorded for a memory snapshot; each takes a few hundred bytes of host memory."""


class StepProfile:
    """Profiles the configured steps. `enter` must be registered as an observer of `train.events.RunEvents`. Writes to
    `profile/` in the run folder: traces `rank-N.json.gz` for chrome://tracing or Perfetto, and memory snapshots for
    https://pytorch.org/memory_viz. A failed write is reported on stderr; training continues.
    """

    def __init__(
        self, config: ProfileConfig, context: ParallelContext, run_dir: Path | None, log_interval: int
    ) -> None:
        """Starts recording the memory history if a memory snapshot is requested.

        Raises EnvironmentProblem if a requested feature needs a GPU and the run is on a CPU.
        """
        self._config = config
        self._folder = run_dir / FOLDER if run_dir else Path(FOLDER)
        self._rank = context.rank
        self._log_interval = log_interval
        self._profiler: profile | None = None
        self._running = False
        self._guard = Guard(partial(print, file=sys.stderr, flush=True))
        self._wanted = config.tool != "none" and (not config.profile_ranks or context.rank in config.profile_ranks)
        on_gpu = context.device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if not on_gpu and config.tool == "cuda":
            raise EnvironmentProblem("--profile needs a GPU, and this run is on a CPU; use --use-pytorch-profiler")
        if not on_gpu and config.memory_snapshot:
            raise EnvironmentProblem("--record-memory-history needs a GPU, and this run is on a CPU; remove it")
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def enter(self, phase: str, iteration: int) -> None:
        """Starts or stops profiling at the beginning of a phase. `iteration` is the iteration about to run
        if the phase is "step", and the last completed iteration otherwise."""
        done = iteration - 1 if phase == "step" else iteration
        if self._running and (phase != "step" or done >= self._config.profile_step_end):
            self._stop()
        elif (
            phase == "step"
            and self._wanted
            and not self._running
            and self._config.profile_step_start <= done < self._config.profile_step_end
        ):
            self._start()
        if phase == "step" and done and done % self._log_interval == 0:
            self._write_snapshot()

    def close(self) -> None:
        """Ends a running profile and writes the memory snapshot if requested. Called at the end of the run."""
        if self._running:
            self._stop()
        self._write_snapshot()

    def _start(self) -> None:
        self._running = True
        if self._config.tool == "cuda":
            torch.cuda.profiler.start()
            return
        self._profiler = profile(
            activities=self._activities,
            record_shapes=self._config.pytorch_profiler_collect_shapes,
            with_stack=self._config.pytorch_profiler_collect_callstack,
        )
        self._profiler.start()

    def _stop(self) -> None:
        self._running = self._wanted = False
        if self._profiler is None:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            return
        self._profiler.stop()
        path = self._folder / f"rank-{self._rank}.json.gz"
        self._guard.run("profile", partial(_write, path, self._profiler.export_chrome_trace))

    def _write_snapshot(self) -> None:
        if self._config.memory_snapshot:
            path = snapshot_path(self._folder, self._config.memory_snapshot, self._rank)
            self._guard.run("memory snapshot", partial(_write, path, torch.cuda.memory._dump_snapshot))


def _write(path: Path, write: Callable[[str], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(str(path))


def snapshot_path(folder: Path, name: str, rank: int) -> Path:
    """Path of a rank's memory snapshot in `folder`: "NAME_RANK.SUFFIX" for `name` "NAME.SUFFIX", as in Megatron."""
    path = folder / name
    return path.with_name(f"{path.stem}_{rank}{path.suffix}")


def annotate_modules(model: nn.Module, device: torch.device) -> None:
    """Adds a profiler range (on a GPU also an NVTX range) with the module's name to the forward of `MARKED` modules."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in MARKED:
            mark = _Range(name, nvtx=device.type == "cuda")
            module.register_forward_pre_hook(mark.begin)
            module.register_forward_hook(mark.end, always_call=True)


class _Range:
    """Profiler range around a module's forward: `begin` is its forward pre-hook and `end` its forward hook."""

    def __init__(self, name: str, *, nvtx: bool) -> None:
        self._name, self._nvtx = name, nvtx
        self._open: list[Any] = []

    def begin(self, *_: object) -> None:
        self._open.append(record_function(self._name).__enter__())
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)

    def end(self, *_: object) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)
