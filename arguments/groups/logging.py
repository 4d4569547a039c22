"""What is reported, how often and where to."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class LoggingFlags:
    """The run folder, the log line, TensorBoard, W&B, timers and profiles."""

    run_dir: str | None = flag(None, status="ours", essential=True)
    """Folder of the run: configuration, logs, metrics, plots and checkpoints."""
    log_interval: int = flag(100, least=1, essential=True)
    """Iterations between log lines."""
    log_style: Literal["megatron", "short"] = flag("megatron", status="ours")
    """Megatron's long line, or one for people."""
    progress_bar: bool = flag(True, status="ours")
    """On a terminal, one live line of progress instead of the step lines, which log.txt has."""
    plots: bool = flag(True, status="ours")
    """Draw plots into the run folder at the end."""
    log_throughput: bool = flag(
        False, status="close", note="keys outside of a sliding window are no work (docs/model.md)"
    )
    """TFLOP/s per GPU in the log line."""
    log_params_norm: bool = flag(False)
    """Norm of the parameters in the log line."""
    log_num_zeros_in_grad: bool = flag(False)
    """Zeros among the gradients in the log line."""
    log_timers_to_tensorboard: bool = flag(False)
    """Times to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = flag(False)
    """Validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False)
    """Memory to TensorBoard."""
    log_memory_interval: int | None = flag(None, least=1)
    """Iterations between memory lines. Not set: one line, after the first report."""
    log_device_memory_used: bool = flag(False)
    """In the memory line also what all processes occupy on the device, by its driver's count."""
    log_world_size_to_tensorboard: bool = flag(False)
    """World size to TensorBoard."""
    log_progress: bool = flag(False)
    """A line in progress.txt, in the folder of checkpoints, for every start and every checkpoint."""
    log_energy: bool = flag(False, status="not yet", harmless=True, note="no counter of energy is read")
    """Energy per GPU."""
    log_max_attention_logit: bool = flag(
        False, status="not yet", harmless=True, note="logits of attention are not looked at"
    )
    """Largest attention logit."""
    log_straggler: bool = flag(False, status="close", note="one attention of every rank is timed, and its data")
    """Report slow ranks with every log line."""
    straggler_minmax_count: int = flag(1, least=1, status="close", note="the slowest alone are named")
    """How many slow ranks are named."""
    timing_log_level: Literal[0, 1, 2] = flag(0)
    """How much is timed."""
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax")
    """How times of ranks are summed up."""
    tensorboard_dir: str | None = flag(None)
    """Folder for TensorBoard. Not set: tensorboard/ in the run folder."""
    tensorboard_log_interval: int = flag(1, least=1)
    """Iterations between TensorBoard entries."""
    wandb_project: str | None = flag(None)
    """W&B project; switches W&B on."""
    wandb_exp_name: str | None = flag(None)
    """W&B name of the run."""
    wandb_entity: str | None = flag(None)
    """W&B team."""
    wandb_save_dir: str | None = flag(None)
    """Folder for W&B's files. Not set: the run folder."""

    profile: bool = flag(False)
    """Profile chosen iterations: mark them for an external profiler, or write a trace."""
    profile_step_start: int = flag(10, least=0)
    """Iterations before the first profiled one."""
    profile_step_end: int = flag(12, least=1)
    """Last profiled iteration."""
    profile_ranks: tuple[int, ...] = flag(())
    """Profiled ranks. Not set: all."""
    use_pytorch_profiler: bool = flag(False, status="close", note="traces go to profile/ in the run folder")
    """Write a trace with torch's profiler."""
    record_memory_history: bool = flag(False, status="close", note="snapshots go to profile/ in the run folder")
    """Record what the device's allocator does; a snapshot at every log interval and at the end, whatever ended it."""
    memory_snapshot_path: str = flag("snapshot.pickle")
    """File for recorded allocations; the number of the rank is added to its name."""
    nvtx_ranges: bool = flag(False, status="close", note="the forwards of the model's parts have marks")
    """Name the parts of the model in profiles."""
    pytorch_profiler_collect_shapes: bool = flag(False)
    """Shapes in the trace."""
    pytorch_profiler_collect_callstack: bool = flag(False)
    """Call stacks in the trace."""
    save_tokens_per_expert_interval: int | None = flag(
        None,
        status="not yet",
        harmless=True,
        note="loads of experts stand in metrics.jsonl and in plots/expert_load.png",
    )
    """Iterations between files with the tokens of every expert."""
