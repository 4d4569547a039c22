"""Profiles of chosen steps, marks for the parts of the model, and the history of the device's memory."""

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
"""Names of modules that get a mark, wherever they stand in the model."""
_MOST_ALLOCATIONS = 1_000_000
"""That a snapshot keeps, some hundred bytes each."""


class StepProfile:
    """Profiles the steps of a run that its spec names. Told of every phase of the run
    (`resilience.watchdog.Watchdog.then`).

    Files go to `profile/` in the run folder: `rank-N.json.gz` for chrome://tracing or Perfetto, and snapshots of memory
    for https://pytorch.org/memory_viz.
    """

    def __init__(
        self, config: ProfileConfig, context: ParallelContext, run_dir: Path | None, log_interval: int
    ) -> None:
        """Begins to record allocations if they are wanted.

        Raises EnvironmentProblem when what is asked for needs a GPU and there is none.
        """
        self._config = config
        self._folder = run_dir / FOLDER if run_dir else Path(FOLDER)
        self._rank = context.rank
        self._log_interval = log_interval
        self._profiler: profile | None = None
        self._marking = False
        """An external profiler is on."""
        self._wanted = config.tool != "none" and (not config.ranks or context.rank in config.ranks)
        on_gpu = context.device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if not on_gpu and config.tool == "cuda":
            raise EnvironmentProblem(
                "--profile marks steps for an external profiler of GPUs, and this run is on a CPU; "
                "--use-pytorch-profiler writes a trace here too"
            )
        if not on_gpu and config.memory_snapshot:
            raise EnvironmentProblem(
                "--record-memory-history records what the allocator of a GPU does, and this run is on a CPU; "
                "leave it out"
            )
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def enter(self, phase: str, iteration: int) -> None:
        """A phase of the run begins; with "step" the iteration of that number."""
        done = iteration - 1 if phase == "step" else iteration
        if self._profiling and (phase != "step" or done >= self._config.last):
            self._stop()
        elif phase == "step" and self._wanted and self._config.after <= done < self._config.last:
            self._start()
        if phase == "step" and done and done % self._log_interval == 0:
            self._write_snapshot()

    def close(self) -> None:
        """Writes what there is, in whatever way the run ends."""
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
            activities=self._activities, record_shapes=self._config.shapes, with_stack=self._config.stacks
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
    """Megatron's name of a rank's snapshot; a relative one stands in the folder."""
    path = folder / name
    return path.with_name(f"{path.stem}_{rank}{path.suffix}")


def mark_parts(model: nn.Module, device: torch.device) -> None:
    """From now on the forwards of the model's parts have names in profiles: those of their modules."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in MARKED:
            before, after = _mark(name, nvtx=device.type == "cuda")
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)


def _mark(name: str, *, nvtx: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    open_marks: list[Any] = []

    def before(*_: object) -> None:
        mark = record_function(name)
        mark.__enter__()
        open_marks.append(mark)
        if nvtx:
            torch.cuda.nvtx.range_push(name)

    def after(*_: object) -> None:
        if nvtx:
            torch.cuda.nvtx.range_pop()
        open_marks.pop().__exit__(None, None, None)

    return before, after
