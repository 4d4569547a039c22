"""Training-loop flags."""

from dataclasses import dataclass

from arguments.flag import REQUIRED, differs, flag, refused, unsupported


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Batch sizes, run length, evaluation, seeds, exit conditions."""

    micro_batch_size: int = flag(REQUIRED, least=1, essential=True)
    """Number of sequences per microbatch on each data-parallel rank."""
    global_batch_size: int | None = flag(None, least=1, essential=True)
    """Number of sequences per step over all ranks. Default: one microbatch per data-parallel rank."""
    rampup_batch_size: tuple[int, int, int] | None = flag(None, least=1)
    """START INCREMENT SAMPLES: ramp up the global batch size from START in steps of INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = flag(None)
    """Global batch size as a step function of the consumed tokens: `"0:768 250B:1536"` trains with 768 sequences up to
    250 billion tokens. Sizes may increase or decrease; `--global-batch-size` must be the largest of them."""
    decrease_batch_size_if_needed: bool = unsupported(False, "choose a divisible batch size")
    """Round the global batch size down to a multiple of microbatch size x data-parallel size."""
    train_iters: int | None = flag(None, least=1, essential=True)
    """Number of training iterations."""
    train_samples: int | None = flag(None, least=1)
    """Number of training samples; replaces `--train-iters`."""
    eval_interval: int | None = flag(None, least=1, essential=True)
    """Iterations between evaluations. Default: no evaluation during training."""
    eval_iters: int | None = differs(None, "in Megatron-LM the default is 100, also on mock data", least=0)
    """Number of global batches per evaluation. Default: 100, but at most the number of iterations on mock data."""
    eval_global_batch_size: int | None = flag(None, least=1)
    """Number of sequences over all ranks per evaluation batch. Default: `--global-batch-size`."""
    eval_micro_batch_size: int | None = flag(None, least=1)
    """Number of sequences per evaluation microbatch, at most `--micro-batch-size`. Default: `--micro-batch-size`."""
    skip_train: bool = flag(False)
    """Evaluate without training."""
    exit_interval: int | None = flag(None, least=1)
    """Save and exit when the iteration is a multiple of this number."""
    exit_duration_in_mins: int | None = flag(None, least=1)
    """Save and exit after this many minutes."""
    seed: int = differs(1234, "same data order, but other initial weights and dropout masks", least=0, below=2**32)
    """Seed of initial weights, dropout masks and data order."""
    use_cpu_initialization: bool = flag(False)
    """Draw the initial weights on the CPU, which is slower but independent of the GPU model. Off: draw them on the
    device."""
    data_parallel_random_init: bool = refused(False, "data-parallel replicas always start with identical weights")
    """Initialise weights differently on each data-parallel rank."""
    manual_gc: bool = flag(False)
    """Disable automatic garbage collection; collect every `--manual-gc-interval` iterations instead."""
    manual_gc_interval: int = flag(0, least=0)
    """Number of iterations between manual garbage collections; 0: no collections during training."""
    manual_gc_eval: bool = flag(True, off=("--disable-manual-gc-eval",))
    """With `--manual-gc`, also collect garbage before and after evaluations."""
    iterations_to_skip: tuple[int, ...] = differs(
        (), "iterations are numbered as in the log; Megatron-LM's numbers are smaller by one", least=1
    )
    """Iterations, counted from 1, whose samples are skipped without a training step."""
