"""Saving and loading checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from megatron_moe.config.data import TokenizerConfig

HUGGING_FACE = "hf:"
"""Prefix of the values of `--load` and `--pretrained-checkpoint` that name a Hugging Face folder."""


@dataclass(frozen=True, kw_only=True)
class HFDescription:
    """What a generated Hugging Face folder contains besides the model."""

    vocab_size: int
    """Size of the vocabulary without padding."""
    tokenizer: TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Locations, contents and retention of checkpoints."""

    save: Path | None = None
    """Directory in which the run saves its checkpoints. None means that no checkpoints are saved."""
    save_interval: int | None = None
    """Number of iterations between saves. None means only one save, at the end of the run."""
    load: str | None = None
    """Checkpoint directory, or `hf:DIR` for a local Hugging Face folder (`--load`); None if the flag is not given."""
    pretrained_checkpoint: str | None = None
    """Checkpoint from which only weights are loaded, if `load` holds no checkpoint (`--pretrained-checkpoint`); None if
    the flag is not given."""
    ckpt_step: int | None = None
    """Iteration of the checkpoint to load. None means the newest checkpoint that passes verification."""
    finetune: bool = False
    """Loads only the weights of `load`, without optimizer and training state, and starts at iteration 0."""
    skip_train: bool = False
    """Evaluates without training (`--skip-train`): loads no optimizer state and casts weights to the run's dtype."""
    load_optim: bool = True
    save_optim: bool = True
    exit_on_missing_checkpoint: bool = False
    override_ckpt_iteration: int | None = None
    """Replaces the loaded iteration number, unless the run resumes from `save` (`--override-ckpt-iteration`). None
    keeps the loaded number."""
    fresh: bool = False
    """Ignores existing checkpoints in `save` (they are moved to a subfolder) instead of resuming from them."""
    keep_last_checkpoints: int | None = None
    """Number of newest checkpoints to keep (`--keep-last-checkpoints`). None keeps all, or only the newest if
    `save_retain_interval` is set."""
    save_retain_interval: int | None = None
    """Additionally keeps checkpoints whose iteration is a multiple of this number (`--save-retain-interval`); None
    keeps no additional ones."""
    keep_best_checkpoint: bool = False
    """Additionally keeps the checkpoint with the lowest validation loss (`--keep-best-checkpoint`)."""
    async_save: bool = False
    max_save_failures: int = 3
    """Number of consecutive failed saves after which the run ends (`--on-save-failure`)."""
    moe_use_upcycling: bool = False
    moe_upcycling_granularity: int = 1
    """FFN hidden size of the dense checkpoint divided by that of an expert (`--moe-upcycling-granularity`)."""
    save_hf_interval: int | None = None
    """Number of iterations between exports of the model as a Hugging Face folder. None means no exports."""
    save_hf_config: Path | None = None
    """Folder whose config.json and tokenizer files are copied into each Hugging Face export. If None, they are
    generated from `hf_description`."""
    hf_description: HFDescription | None = None
    """Tokenizer and vocabulary size of exports whose config.json is generated from the model; None if `save_hf_config`
    is given."""

    def max_num_checkpoints(self, train_iters: int) -> int:
        """Maximum number of checkpoints that exist in `save` at the same time during a run of `train_iters` iterations.
        A new checkpoint is complete before an old one is deleted."""
        saves = -(-train_iters // (self.save_interval or train_iters)) if train_iters else 1
        if self.keep_last_checkpoints is None and self.save_retain_interval is None:
            return saves
        retained = train_iters // self.save_retain_interval if self.save_retain_interval else 0
        return min(saves, (self.keep_last_checkpoints or 1) + 1 + self.keep_best_checkpoint + retained)
