"""Checkpoint flags."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from arguments.flag import differs, flag, new_flag, refused, unsupported
from arguments.values import FilePath

_non_persistent = partial(
    unsupported, note="only persistent checkpoints every --save-interval iterations are implemented", harmless=True
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Saving, resuming and loading checkpoints."""

    save: FilePath | None = flag(None)
    """Checkpoint folder. Default: checkpoints/ in the run folder. A run with `--mock-data` saves checkpoints there only
    if `--save-interval` or `--save-hf-interval` is set."""
    save_interval: int | None = flag(None, least=1, names=("--persistent-save-interval",), essential=True)
    """Iterations between checkpoints. Default: save only when the run ends, or nothing with `--mock-data`, which trains
    on random tokens."""
    save_retain_interval: int | None = flag(None, least=1)
    """Delete all checkpoints except the newest ones and those whose iteration is a multiple of this number."""
    keep_best_checkpoint: bool = new_flag(False)
    """Never delete the checkpoint with the lowest validation loss. Ignores checkpoints without a validation loss."""
    on_save_failure: Literal["continue", "stop"] = new_flag("continue")
    """Action if a checkpoint cannot be written: end the run now (stop) or after three failures in a row (continue)."""
    save_hf_interval: int | None = new_flag(None, least=1)
    """Iterations between exports to Hugging Face format, which are written to hf/ in the checkpoint folder. The run
    also exports when it ends. Default: no exports."""
    save_hf_config: FilePath | None = new_flag(None)
    """Folder whose config.json and tokenizer files are copied into exports. Default: the hf: folder given by `--load`
    or `--pretrained-checkpoint`, otherwise files generated for the model and its tokenizer."""
    keep_last_checkpoints: int | None = new_flag(None, least=1)
    """Number of newest checkpoints to keep. Default: 1 with `--save-retain-interval`, otherwise all."""
    load: FilePath | None = flag(None, essential=True)
    """Checkpoint folder to resume from, or hf:FOLDER for Hugging Face weights. Used only if the checkpoint folder of
    this run (`--save`) has no checkpoint."""
    fresh: bool = new_flag(False)
    """Start at iteration 0 even if the run's checkpoint folder contains checkpoints."""
    finetune: bool = flag(False)
    """Load weights only and start at iteration 0."""
    pretrained_checkpoint: FilePath | None = flag(None)
    """Checkpoint with initial weights, used if `--load` is not set or has no checkpoint."""
    ckpt_step: int | None = flag(None, least=0)
    """Iteration of the checkpoint to load. Default: the newest."""
    exit_on_missing_checkpoint: bool = flag(False)
    """Exit if the folder given by `--load` contains no checkpoint."""
    load_optim: bool = flag(True)
    """Load optimizer state."""
    save_optim: bool = flag(True)
    """Save optimizer state."""
    load_main_params_from_ckpt: bool = unsupported(
        False, "with --no-load-optim, master weights are always copied from the model weights"
    )
    """Initialise the optimizer's master weights from the model weights of the checkpoint."""
    use_checkpoint_args: bool = unsupported(
        False, "use --config with the run.yaml of the run that wrote the checkpoint"
    )
    """Use the model flags that are stored in the checkpoint."""
    override_ckpt_iteration: int | None = differs(
        None, "ignored for the run's own checkpoints, so that a restarted run resumes at the right iteration", least=0
    )
    """Iteration number that replaces the one of the checkpoint loaded from `--load`."""

    ckpt_convert_format: Literal["torch", "torch_dist"] | None = refused(
        None, "only one checkpoint format is implemented"
    )
    """Convert a checkpoint to this format and exit."""
    ckpt_convert_save: str | None = refused(None, "only one checkpoint format is implemented")
    """Output folder of `--ckpt-convert-format`."""
    async_save: bool = flag(False)
    """Write checkpoints in the background; training is blocked only while state is copied to host memory."""
    non_persistent_save_interval: int | None = _non_persistent(None)
    """Iterations between non-persistent checkpoints; each replaces the previous one."""
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = _non_persistent(None)
    """Storage of non-persistent checkpoints: a shared file system, a local one, or memory."""
    non_persistent_global_ckpt_dir: FilePath | None = _non_persistent(None)
    """Folder for non-persistent checkpoints."""
