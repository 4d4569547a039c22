"""What a training run does: optimizer, learning rate, data, loop, checkpoints and logs as narrow frozen specs."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from megatron_moe.specs.resilience.faults import Fault


@dataclass(frozen=True, kw_only=True)
class StateOffloadSpec:
    """Which part of master weights and moments waits in host memory, and who steps it."""

    fraction: float = 0.0
    """Share of what a rank owns, in elements: the first ones of every buffer, in whole blocks."""
    host_steps: bool = False
    """The host updates that part (`--optimizer-cpu-offload`). False: it visits the device for the update
    (`--chunked-optimizer-state-offload`)."""
    overlap: bool = False
    """Host steps: gradients and weights travel while the host computes."""
    torch_kernel: bool = False
    """Host steps: by torch's fused AdamW, which is faster and rounds in another order than the reference."""
    pin_grads: bool = True
    pin_params: bool = True
    chunk_bytes: int = 0
    """Visits to the device: bytes of state that are there at a time, of two chunks; 0: everything at once."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101) with decoupled weight decay."""

    kind: Literal["adam"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0: no clipping."""
    decay_qk_norm: bool = False
    decoupled_lr: float | None = None
    """Of embedding and head."""
    decoupled_min_lr: float | None = None
    offload: StateOffloadSpec = StateOffloadSpec()
    in_forward: bool = False
    """The update goes on under the next forward, whose layers wait for their own weights."""


@dataclass(frozen=True, kw_only=True)
class LRSpec:
    """Learning rate and weight decay over samples. Every `*_samples` counts sequences."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    warmup_samples: float = 0
    """A share of `decay_samples` need not be whole."""
    decay_samples: int
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    wsd_decay_samples: int | None = None
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay_samples: int | None = None
    """Over which weight decay moves from start to end (Megatron: the whole run); None: `decay_samples`."""
    override: bool = False
    """The command line wins over the checkpoint."""
    use_checkpoint: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """How a global batch is cut into microbatches."""

    micro: int
    """Sequences per microbatch and rank."""
    global_size: int
    """Sequences per step over all ranks, at the end of any ramp-up."""
    rampup: tuple[int, int, int] | None = None
    """(start size, increment, samples over which to ramp)."""

    def size_at(self, consumed_samples: int) -> int:
        """Sequences of the step that begins after `consumed_samples`: the size grows at equal distances of samples."""
        if self.rampup is None:
            return self.global_size
        start, increment, over = self.rampup
        num_increments = (self.global_size - start) // increment
        if num_increments == 0 or consumed_samples > over:
            return self.global_size
        return start + increment * int(consumed_samples / (over / num_increments)) if over else start

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Number of whole batches in `samples` after the first `consumed`; a last partial batch is not trained."""
        steps, ramp_samples = 0, self.rampup[2] if self.rampup else -1
        while consumed <= ramp_samples and consumed + self.size_at(consumed) <= samples:
            together = self._steps_of_equal_size(consumed, min(ramp_samples, samples))
            consumed += together * self.size_at(consumed)
            steps += together
        return steps + max(samples - consumed, 0) // self.global_size

    def megatron_steps_for(self, samples: int) -> int:
        """Iteration at which Megatron-LM ends a run of `samples` (`update_train_iters` of its training.py).

        Megatron-LM counts from the first sample in the present batch sizes, even in a resumed run. Within the ramp-up
        it takes a batch as long as no more than `samples` are consumed before it, so the run may exceed `samples`.
        """
        steps = consumed = 0
        while self.rampup is not None and consumed <= min(self.rampup[2], samples):
            consumed += self.size_at(consumed)
            steps += 1
        return steps + max(samples - consumed, 0) // self.global_size

    def _steps_of_equal_size(self, consumed: int, end: int) -> int:
        """Number of steps from `consumed`, at least 1, that have the size of the first and end by `end`."""
        assert self.rampup is not None, "without a ramp-up all steps have the same size"
        size, (start, increment, over) = self.size_at(consumed), self.rampup
        num_increments = (self.global_size - start) // increment
        next_size_at = over / max(num_increments, 1) * ((size - start) // increment + 1)
        number = min(ceil((next_size_at - consumed) / size), (end - consumed) // size)
        while number > 1 and self.size_at(consumed + (number - 1) * size) != size:  # rounding
            number -= 1
        return max(number, 1)


OTHER_TOKENIZER_NAMES: Mapping[str, str] = MappingProxyType(
    {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
)
"""Megatron's other names -> the kind of a `TokenizerSpec`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer turns text into ids. Kinds have Megatron's names."""

    kind: Literal[
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
        "TikTokenizer",
        "GPT2BPETokenizer",
        "ByteTokenizer",
        "NullTokenizer",
    ]
    model: Path | None = None
    vocab_file: Path | None = None
    """Of GPT2BPETokenizer, with `merge_file`."""
    merge_file: Path | None = None
    eod: int | None = None
    """Of NullTokenizer; None: the last id."""
    pad: int = -1
    """Of NullTokenizer; -1: none."""
    vocab_size: int | None = None
    """Of NullTokenizer; TikTokenizer keeps no more ids than this. The other kinds know their own."""
    tiktoken_pattern: str | None = None
    num_special_tokens: int = 1000
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where sequences come from and how they are masked."""

    train: tuple[str, ...] = ()
    """Prefixes, or weight prefix pairs, of this split alone; empty: take `blend` with `split`."""
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    blend: tuple[str, ...] = ()
    """`--data-path`."""
    split: str = "969, 30, 1"
    mock: bool = False
    mock_documents: int = 100_000
    """As many as Megatron's mock data has: 205 million tokens, too many to index where sequences have a few tokens."""
    cache_dir: Path | None = None
    seq_length: int
    seed: int = 1234
    tokenizer: TokenizerSpec
    vocab_size: int
    """True (unpadded) vocabulary: larger ids in the data are an error."""
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    mmap: bool = True
    num_workers: int = 0
    drop_last_partial_validation: bool = True
    multiple_validation_sets: bool = False
    full_validation: bool = False
    """An evaluation reads every validation set once, whatever `LoopSpec.eval_iters` says."""
    surplus: float = 0.005
    """Share by which every data set of a weighted blend is built larger than its part."""
    dataloader: Literal["single", "cyclic"] = "single"


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What is saved and loaded, and from where."""

    save: Path | None = None
    save_interval: int | None = None
    load: str | None = None
    """A directory of ours, or `hf:DIR` for a local Hugging Face folder."""
    pretrained: str | None = None
    """Loaded with `finetune` when `load` holds nothing."""
    ckpt_step: int | None = None
    finetune: bool = False
    weights_only: bool = False
    """The run only evaluates: the optimizer's state is not needed, and weights are cast to the run's type."""
    load_optim: bool = True
    save_optim: bool = True
    exit_on_missing: bool = False
    override_iteration: int | None = None
    """What the iteration of a checkpoint counts as that is not of this run's own folder; None: itself."""
    fresh: bool = False
    """Start at iteration 0 although the save folder holds checkpoints."""
    keep_last: int | None = None
    retain_interval: int | None = None
    """Checkpoints of multiples of it are kept besides the last ones."""
    keep_best: bool = False
    """So is the one with the lowest validation loss."""
    in_background: bool = False
    """Training goes on while a checkpoint is written."""
    most_failures: int = 3
    """So many failed saves in a row end the run."""
    upcycle: bool = False
    upcycle_granularity: int = 1
    hf_interval: int | None = None
    """Iterations between exports as Hugging Face folders; None: no exports."""
    hf_config: Path | None = None
    """Folder whose config.json and tokenizer files the exports carry."""


@dataclass(frozen=True, kw_only=True)
class LoggingSpec:
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
class ProfileSpec:
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


@dataclass(frozen=True, kw_only=True)
class ResilienceSpec:
    """What a run does about signals and about things that go wrong."""

    exit_signals: tuple[str, ...] = ()
    """Names of signals on which all ranks save and leave; none: signals do to the process what they always do."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient that is not finite. The weights never see it."""
    deadlines: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): start, step, evaluation, save, exit; a phase that is not listed may take for ever."""
    compare_replicas_interval: int | None = None
    """Iterations between comparisons of the weights over data-parallel ranks; None: none."""
    most_skips: int = 3
    """So many steps skipped in a row end the run."""
    report_spiky_loss: bool = False
    report_large_grads: bool = False
    timeout_after_start: float | None = None
    """Seconds that a collective may wait after the first step; None: as long as in it."""
    on_spike: Literal["report", "skip", "stop"] = "report"
    """What follows one of these. Unless it is reported alone, the weights never see it."""
    rerun: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """Whether a step that ends the run is computed again to judge the hardware; or every step is, for statistics."""
    faults: tuple[Fault, ...] = ()
    """What tests let happen to the run."""


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """How long to train and when to evaluate or leave."""

    train_iters: int
    """With `train_samples`: iterations of a run that starts with the first sample; see `TrainState.last_iteration`."""
    train_samples: int | None = None
    eval_interval: int | None = None
    eval_iters: int = 100
    exit_interval: int | None = None
    exit_duration_minutes: float | None = None
    seed: int = 1234
    skip_train: bool = False
    per_token_loss: bool = False
    """`--calculate-per-token-loss`: divide once by the tokens of the global batch."""
    check_nonfinite: bool = True
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, whose samples are passed over."""
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
