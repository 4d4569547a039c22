"""Training-loop flags."""

from dataclasses import dataclass

from arguments.flag import REQUIRED, flag


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Batch sizes, run length, evaluation, seeds, exit conditions."""

    micro_batch_size: int = flag(REQUIRED, least=1, essential=True)
    """Sequences per microbatch on each data-parallel rank."""
    global_batch_size: int | None = flag(None, least=1, essential=True)
    """Sequences per step over all ranks. Not set: one microbatch per data-parallel rank."""
    rampup_batch_size: tuple[int, int, int] | None = flag(None, least=1)
    """START INCREMENT SAMPLES: ramp up the global batch size from START in steps of INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = flag(None, status="not yet", note="use --rampup-batch-size")
    """Global batch sizes at thresholds of consumed samples."""
    decrease_batch_size_if_needed: bool = flag(False, status="not yet", note="choose a divisible batch size")
    """Round down a batch size that is not divisible by the number of ranks."""
    train_iters: int | None = flag(None, least=1, essential=True)
    """Number of training iterations."""
    train_samples: int | None = flag(None, least=1)
    """Number of training samples; replaces `--train-iters`."""
    eval_interval: int | None = flag(None, least=1, essential=True)
    """Iterations between evaluations. Not set: none during training."""
    eval_iters: int | None = flag(None, least=0, status="close", note="Megatron-LM's default is 100 on mock data too")
    """Batches per evaluation. Not set: 100; on mock data at most the number of training iterations."""
    skip_train: bool = flag(False)
    """Evaluate without training."""
    exit_interval: int | None = flag(None, least=1)
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: int | None = flag(None, least=1)
    """Save and exit after this many minutes."""
    seed: int = flag(
        1234, least=0, below=2**32, status="close", note="same data order, different initial weights and dropout masks"
    )
    """Random seed."""
    data_parallel_random_init: bool = flag(
        False, status="refused", note="data-parallel replicas always start with identical weights"
    )
    """Initialize weights differently on each data-parallel rank."""
    manual_gc: bool = flag(False)
    """Disable automatic garbage collection and collect at fixed intervals."""
    manual_gc_interval: int = flag(0, least=0)
    """Iterations between manual garbage collections."""
    manual_gc_eval: bool = flag(True, off=("--disable-manual-gc-eval",))
    """Collect garbage before and after evaluations."""
    iterations_to_skip: tuple[int, ...] = flag(
        (),
        least=1,
        status="close",
        note="iterations are numbered as in the log; Megatron-LM's numbers are smaller by one",
    )
    """Iterations, counted from 1, whose samples are skipped without a training step."""
