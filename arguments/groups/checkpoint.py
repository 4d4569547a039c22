"""What is saved and loaded."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag

_ONE_KIND = "there is one kind of checkpoint, written every --save-interval iterations"


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Saving, resuming, loading weights."""

    save: str | None = flag(None)
    """Folder for checkpoints. Not set: checkpoints/ in the run folder; on mock data only with `--save-interval`."""
    save_interval: int | None = flag(None, least=1, names=("--persistent-save-interval",), essential=True)
    """Iterations between checkpoints. Not set: only when the run ends."""
    save_retain_interval: int | None = flag(None, least=1)
    """Keep only checkpoints of multiples of this, and the last one."""
    keep_best_checkpoint: bool = flag(False, status="ours")
    """Never delete the checkpoint with the lowest validation loss of those evaluated at their own iteration."""
    on_save_failure: Literal["continue", "stop"] = flag("continue", status="ours")
    """When a checkpoint cannot be written: go on, until the third time in a row, or end the run."""
    save_hf_interval: int | None = flag(None, least=1, status="ours")
    """Iterations between exports as Hugging Face folders, into hf/ of the folder for checkpoints; also when the run
    ends. Not set: none."""
    save_hf_config: str | None = flag(None, status="ours")
    """Folder whose config.json and tokenizer files the exports carry. Not set: the hf: folder of `--load` or
    `--pretrained-checkpoint`."""
    keep_last_checkpoints: int | None = flag(None, least=1, status="ours")
    """Delete older checkpoints than the last so many. Not set: keep all."""
    load: str | None = flag(None, essential=True)
    """Folder with checkpoints to go on from, or hf:FOLDER for Hugging Face weights. A checkpoint of the run's own
    folder comes first."""
    fresh: bool = flag(False, status="ours")
    """Start at iteration 0 although the run's folder holds checkpoints."""
    finetune: bool = flag(False)
    """Take weights only and start at iteration 0."""
    pretrained_checkpoint: str | None = flag(None)
    """Weights to start from where `--load` holds nothing."""
    ckpt_step: int | None = flag(None, least=0)
    """Iteration to load instead of the newest."""
    exit_on_missing_checkpoint: bool = flag(False)
    """Leave when `--load` holds nothing."""
    load_optim: bool = flag(True)
    """Load the optimizer's state."""
    save_optim: bool = flag(True)
    """Save the optimizer's state."""
    load_main_params_from_ckpt: bool = flag(
        False, status="not yet", note="master weights come with the optimizer's state, or are made from the weights"
    )
    """Take master weights from the checkpoint's weights."""
    use_checkpoint_args: bool = flag(False, status="not yet", note="give --config with the run.yaml of that run")
    """Take the model's flags from the checkpoint."""
    override_ckpt_iteration: int | None = flag(
        None, least=0, status="close", note="not of the run's own checkpoints, so that a restart goes on"
    )
    """What the iteration of a checkpoint of `--load` counts as."""

    ckpt_convert_format: Literal["torch", "torch_dist"] | None = flag(
        None, status="refused", note="there is one format; nothing is converted"
    )
    """Convert a checkpoint and leave."""
    ckpt_convert_save: str | None = flag(None, status="refused", note="there is one format; nothing is converted")
    """Where the converted checkpoint goes."""
    async_save: bool = flag(False)
    """Write checkpoints in the background: training waits only for a copy to host memory."""
    non_persistent_save_interval: int | None = flag(None, status="not yet", harmless=True, note=_ONE_KIND)
    """Iterations between rolling checkpoints."""
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = flag(
        None, status="not yet", harmless=True, note=_ONE_KIND
    )
    """Kind of rolling checkpoints."""
    non_persistent_global_ckpt_dir: str | None = flag(None, status="not yet", harmless=True, note=_ONE_KIND)
    """Folder for rolling checkpoints."""
