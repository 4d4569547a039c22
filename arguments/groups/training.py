"""Batches, length of the run, evaluation, leaving."""

from dataclasses import dataclass

from arguments.flag import REQUIRED, flag


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Batches, length of the run, evaluation, seeds, and leaving early."""

    micro_batch_size: int = flag(REQUIRED, least=1, essential=True)
    """Sequences per microbatch and rank."""
    global_batch_size: int | None = flag(None, least=1, essential=True)
    """Sequences per step over all ranks. Not set: one microbatch per rank."""
    rampup_batch_size: tuple[int, int, int] | None = flag(None, least=1)
    """START INCREMENT SAMPLES: the global batch grows from START in steps of INCREMENT over so many samples."""
    step_batch_size_schedule: str | None = flag(None, status="not yet", note="use --rampup-batch-size")
    """Batch sizes at thresholds."""
    decrease_batch_size_if_needed: bool = flag(False, status="not yet", note="choose a batch size that divides")
    """Round a batch size down that the ranks do not divide."""
    train_iters: int | None = flag(None, least=1, essential=True)
    """Iterations of the run."""
    train_samples: int | None = flag(None, least=1)
    """Samples of the run, instead of iterations."""
    eval_interval: int | None = flag(None, least=1, essential=True)
    """Iterations between evaluations. Not set: none during training."""
    eval_iters: int | None = flag(None, least=0, status="close", note="Megatron-LM's default is 100 on mock data too")
    """Batches of an evaluation. Not set: 100, on mock data at most the iterations of the run."""
    skip_train: bool = flag(False)
    """Evaluate only."""
    exit_interval: int | None = flag(None, least=1)
    """Save and leave when the iteration is a multiple of this."""
    exit_duration_in_mins: int | None = flag(None, least=1)
    """Save and leave after so many minutes."""
    seed: int = flag(
        1234, least=0, below=2**32, status="close", note="the same order of data, but other weights and dropout"
    )
    """Start of all random numbers."""
    data_parallel_random_init: bool = flag(
        False, status="refused", note="all data-parallel ranks hold the same weights"
    )
    """Other initial weights on every data-parallel rank."""
    manual_gc: bool = flag(False)
    """Collect Python's garbage at chosen iterations only."""
    manual_gc_interval: int = flag(0, least=0)
    """Iterations between collections."""
    manual_gc_eval: bool = flag(True, off=("--disable-manual-gc-eval",))
    """Collect around evaluations."""
    iterations_to_skip: tuple[int, ...] = flag(
        (), least=1, status="close", note="numbers are those of the log; Megatron-LM's are smaller by one"
    )
    """Iterations, counted from 1, whose samples are passed over without a step."""
