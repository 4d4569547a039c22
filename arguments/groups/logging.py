"""Logging and profiling flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag, new_flag, unsupported
from arguments.values import FilePath


@dataclass(frozen=True, kw_only=True)
class LoggingFlags:
    """Run folder, log line, TensorBoard, W&B, timers, profiler."""

    run_dir: FilePath | None = new_flag(None, essential=True)
    """Folder of the run: configuration, logs, metrics, plots and checkpoints."""
    log_interval: int = flag(100, least=1, essential=True)
    """Iterations between log lines."""
    log_style: Literal["megatron", "short"] = new_flag("megatron")
    """Log line format: Megatron's long line or a short one."""
    progress_bar: bool = new_flag(True)
    """On a terminal, update one progress line in place instead of printing log lines; log.txt contains all lines."""
    plots: bool = new_flag(True)
    """Write plots to the run folder when the run ends."""
    log_throughput: bool = differs(False, "keys outside a sliding window are not counted (docs/model.md)")
    """Log TFLOP/s per GPU."""
    log_params_norm: bool = flag(False)
    """Log the global L2 norm of the parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Log the number of zeros in the gradients."""
    log_timers_to_tensorboard: bool = flag(False)
    """Write timers to TensorBoard and W&B."""
    log_validation_ppl_to_tensorboard: bool = flag(False)
    """Write validation perplexity to TensorBoard and W&B."""
    log_memory_to_tensorboard: bool = flag(False)
    """Write memory usage to TensorBoard and W&B."""
    log_memory_interval: int | None = flag(None, least=1)
    """Iterations between log lines about memory. Default: once, after the first log line."""
    log_device_memory_used: bool = flag(False)
    """Add the memory used by all processes on the device, as reported by the driver, to the log lines about memory."""
    log_world_size_to_tensorboard: bool = flag(False)
    """Write the world size to TensorBoard and W&B."""
    log_progress: bool = flag(False)
    """Append a line to progress.txt in the checkpoint folder whenever the run is launched and at every checkpoint."""
    log_energy: bool = unsupported(False, "energy counters are not read", harmless=True)
    """Log the energy used per GPU."""
    log_max_attention_logit: bool = flag(False)
    """Log the largest attention logit over all heads and layers. Computes the product of queries and keys a second
    time."""
    log_straggler: bool = differs(False, "times one attention layer and the data loading of every rank")
    """Report slow ranks in every log line."""
    straggler_minmax_count: int = differs(1, "lists only the slowest ranks, not the fastest", least=1)
    """Number of slow ranks that `--log-straggler` lists."""
    timing_log_level: Literal[0, 1, 2] = flag(0)
    """Level of detail of the timers. 1: forward and backward, gradient reduction, optimizer; 2: also attention, router,
    dispatch, experts, combine, head, ..., in forward and backward, measured with CUDA events, without
    synchronisation."""
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax")
    """Timer values to log: the maximum over ranks, the minimum and maximum, or the values of all ranks."""
    tensorboard_dir: FilePath | None = flag(None)
    """TensorBoard folder. Default: tensorboard/ in the run folder; without `--run-dir`, TensorBoard is off."""
    tensorboard_log_interval: int = flag(1, least=1)
    """Iterations between the steps whose loss, learning rate, batch size and gradient norm are written to TensorBoard
    and W&B. Other values are written once per `--log-interval`."""
    wandb_project: str | None = flag(None)
    """W&B project. Setting it enables W&B."""
    wandb_exp_name: str | None = flag(None)
    """W&B run name; required with `--wandb-project`."""
    wandb_entity: str | None = flag(None)
    """W&B entity: user or team that owns the project. Default: the default entity of the W&B account."""
    wandb_save_dir: FilePath | None = flag(None)
    """Folder for W&B files. Default: `--run-dir`, else the current folder."""

    profile: bool = flag(False)
    """Profile iterations with an external profiler such as Nsight Systems, or with `--use-pytorch-profiler`."""
    profile_step_start: int = flag(10, least=0)
    """Last iteration before profiling starts."""
    profile_step_end: int = flag(12, least=1)
    """Last profiled iteration."""
    profile_ranks: tuple[int, ...] = flag(())
    """Ranks to profile. Default: all."""
    use_pytorch_profiler: bool = differs(False, "traces go to profile/ in the run folder")
    """With `--profile`: profile with torch.profiler and write a trace."""
    record_memory_history: bool = differs(False, "snapshots go to profile/ in the run folder")
    """Record allocator history. Write snapshots at every log interval and when the run ends, even after an error."""
    memory_snapshot_path: str = flag("snapshot.pickle")
    """File name of memory snapshots; the rank is added to it."""
    nvtx_ranges: bool = differs(False, "covers forward passes of modules")
    """Add NVTX ranges to the forward passes of the main modules, such as self-attention, router and experts."""
    pytorch_profiler_collect_shapes: bool = flag(False)
    """Record tensor shapes in the trace of `--use-pytorch-profiler`."""
    pytorch_profiler_collect_callstack: bool = flag(False)
    """Record call stacks in the trace of `--use-pytorch-profiler`."""
    save_tokens_per_expert_interval: int | None = unsupported(
        None, "expert loads are written to metrics.jsonl and plots/expert_load.png", harmless=True
    )
    """Iterations between files that contain the number of tokens routed to each expert."""
