"""Logging and profiling."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is reported, how often and where to."""

    run_dir: Path | None = None
    log_interval: int = 100
    style: Literal["megatron", "short"] = "megatron"
    progress_bar: bool = True
    """One live line, only on a terminal, instead of the step lines."""
    tensorboard_dir: Path | None = None
    tensorboard_interval: int = 1
    wandb_project: str = ""
    wandb_exp_name: str = ""
    wandb_entity: str = ""
    wandb_save_dir: Path | None = None
    log_throughput: bool = False
    log_params_norm: bool = False
    log_num_zeros: bool = False
    log_memory: bool = False
    memory_interval: int | None = None
    """Iterations between memory lines; None: one line, after the first report."""
    log_device_memory: bool = False
    log_timers: bool = False
    log_validation_ppl: bool = False
    log_world_size: bool = False
    log_straggler: bool = False
    stragglers_named: int = 1
    log_progress: bool = False
    """progress.txt beside the checkpoints."""
    timing_level: Literal[0, 1, 2] = 0
    timing_option: Literal["max", "minmax", "all"] = "minmax"
    per_layer_moe: bool = False
    plots: bool = True
    """Draw plots/*.png at the end of the run when there is a run folder."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of some steps, marks for the parts of a step, the history of the device's memory."""

    tool: Literal["none", "cuda", "torch"] = "none"
    """cuda: mark the stretch for an external profiler; torch: write a trace."""
    after: int = 10
    """Iterations before the first profiled one."""
    last: int = 12
    """The last profiled iteration."""
    ranks: tuple[int, ...] = ()
    """Empty: all."""
    shapes: bool = False
    stacks: bool = False
    marks: bool = False
    """The parts of the model have names in profiles."""
    memory_snapshot: str | None = None
    """File for the history of allocations, the rank's number added to its name; None: none is recorded."""
