"""Logging and profiling."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Contents, intervals and destinations of logs."""

    run_dir: Path | None = None
    """Run directory with log, metrics, status and plots; None: no such directory."""
    log_interval: int = 100
    log_style: Literal["megatron", "short"] = "megatron"
    progress_bar: bool = True
    """Replaces step lines by one live line if the output is a terminal."""
    tensorboard_dir: Path | None = None
    tensorboard_log_interval: int = 1
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_entity: str | None = None
    wandb_save_dir: Path | None = None
    log_throughput: bool = False
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_memory_to_tensorboard: bool = False
    log_memory_interval: int | None = None
    """Iterations between memory lines; None: one line, after the first log line."""
    log_device_memory_used: bool = False
    """Adds the memory used by all processes on the device to memory lines (`--log-device-memory-used`)."""
    log_timers_to_tensorboard: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    log_straggler: bool = False
    straggler_minmax_count: int = 1
    """Number of slowest ranks to report (`--straggler-minmax-count`)."""
    log_progress: bool = False
    """Appends a line per start and checkpoint to progress.txt in the checkpoint directory."""
    timing_log_level: Literal[0, 1, 2] = 0
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    moe_per_layer_logging: bool = False
    """Logs MoE metrics of each layer (`--moe-per-layer-logging`)."""
    plots: bool = True
    """Draws plots/*.png in the run directory when the run ends."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiler traces, NVTX ranges and the history of device memory."""

    tool: Literal["none", "cuda", "torch"] = "none"
    """cuda: delimits the steps for an external profiler (cudaProfilerStart and Stop); torch: writes a trace."""
    profile_step_start: int = 10
    """Number of iterations before the first profiled one (`--profile-step-start`)."""
    profile_step_end: int = 12
    """Last profiled iteration (`--profile-step-end`)."""
    profile_ranks: tuple[int, ...] = ()
    """Profiled ranks; empty: all."""
    pytorch_profiler_collect_shapes: bool = False
    """Records tensor shapes in the trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Records Python stacks in the trace."""
    nvtx_ranges: bool = False
    """Adds NVTX ranges around the forward of each module (`--nvtx-ranges`)."""
    memory_snapshot: str | None = None
    """Output file of the memory allocation history (`--memory-snapshot-path`), suffixed with the rank; None: none."""
