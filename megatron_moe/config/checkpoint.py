"""Saving and loading checkpoints."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Locations, contents and retention of checkpoints."""

    save: Path | None = None
    """Directory of the run's checkpoints; None: nothing is saved."""
    save_interval: int | None = None
    """Iterations between saves."""
    load: str | None = None
    """Checkpoint directory, or `hf:DIR` for a local Hugging Face folder."""
    pretrained_checkpoint: str | None = None
    """Checkpoint whose weights are loaded, as with `finetune`, if `load` has none (`--pretrained-checkpoint`)."""
    ckpt_step: int | None = None
    """Iteration to load; None: the newest verified checkpoint."""
    finetune: bool = False
    """Loads weights only and starts at iteration 0."""
    skip_train: bool = False
    """Evaluation only (`--skip-train`): skips the optimizer state and casts weights to the run's format."""
    load_optim: bool = True
    save_optim: bool = True
    exit_on_missing_checkpoint: bool = False
    """Exits if `load` has no checkpoint."""
    override_ckpt_iteration: int | None = None
    """Replaces the iteration recorded in the checkpoint of `load`; no effect if the run resumes from `save`
    (`--override-ckpt-iteration`)."""
    fresh: bool = False
    """Starts at iteration 0 even if `save` has checkpoints."""
    keep_last_checkpoints: int | None = None
    """Number of newest checkpoints to keep (`--keep-last-checkpoints`); None: all."""
    save_retain_interval: int | None = None
    """Also keeps checkpoints whose iteration is a multiple of this (`--save-retain-interval`)."""
    keep_best_checkpoint: bool = False
    """Also keeps the checkpoint with the lowest validation loss (`--keep-best-checkpoint`)."""
    async_save: bool = False
    """Writes checkpoints in the background while training continues (`--async-save`)."""
    max_save_failures: int = 3
    """Number of consecutive failed saves after which the run ends (`--on-save-failure`)."""
    moe_use_upcycling: bool = False
    """Loads a dense checkpoint into an MoE model (`--moe-use-upcycling`)."""
    moe_upcycling_granularity: int = 1
    """Number of experts into which each dense MLP is divided (`--moe-upcycling-granularity`)."""
    save_hf_interval: int | None = None
    """Iterations between exports as Hugging Face folders; None: no exports."""
    save_hf_config: Path | None = None
    """Folder whose config.json and tokenizer files are copied into exports."""
