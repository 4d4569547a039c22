"""Logging and profiling."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Contents, intervals and destinations of logs."""

    run_dir: Path | None = None
    """Directory for log, metrics, status and plots of the run. None if these files are not written."""
    log_interval: int = 100
    log_style: Literal["megatron", "short"] = "megatron"
    progress_bar: bool = True
    """Shows one continuously updated line instead of a line per report if the output is a terminal."""
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
    """Number of iterations between log lines with memory use. If None, logs memory use once, after the first report."""
    log_device_memory_used: bool = False
    log_timers_to_tensorboard: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    log_max_attention_logit: bool = False
    log_straggler: bool = False
    straggler_minmax_count: int = 1
    """Number of slowest ranks that each straggler report lists (`--straggler-minmax-count`)."""
    moe_routing_trace_path: Path | None = None
    """Folder for the expert choices of every router call. None if they are not written."""
    moe_routing_trace_max_training_iters: int | None = None
    """Number of iterations after which tracing ends. None means that all iterations are traced."""
    log_progress: bool = False
    """Appends a line to progress.txt in the checkpoint directory whenever the run is launched and at each
    checkpoint."""
    timing_log_level: Literal[0, 1, 2] = 0
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    moe_per_layer_logging: bool = False
    plots: bool = True
    """Draws plots/*.png in the run directory when the run ends."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiler traces, NVTX ranges and the history of device memory."""

    tool: Literal["none", "cuda", "torch"] = "none"
    """cuda: calls cudaProfilerStart and cudaProfilerStop for an external profiler; torch: writes a PyTorch trace."""
    profile_step_start: int = 10
    """Number of completed iterations at which profiling starts (`--profile-step-start`)."""
    profile_step_end: int = 12
    profile_ranks: tuple[int, ...] = ()
    """Global ranks to profile; empty means all ranks."""
    pytorch_profiler_collect_shapes: bool = False
    pytorch_profiler_collect_callstack: bool = False
    nvtx_ranges: bool = False
    """Adds NVTX ranges around the forwards of attention, MLP, router, experts, ... (`--nvtx-ranges`)."""
    memory_snapshot: str | None = None
    """File name for the history of memory allocations (`--memory-snapshot-path`). Each rank writes a file and appends
    its rank to the name. None if the history is not recorded."""
