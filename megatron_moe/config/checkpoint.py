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
    pretrained: str | None = None
    """Loaded like `load` with `finetune` if `load` has no checkpoint (`--pretrained-checkpoint`)."""
    ckpt_step: int | None = None
    """Iteration to load; None: the newest verified checkpoint."""
    finetune: bool = False
    """Loads weights only and starts at iteration 0."""
    weights_only: bool = False
    """Evaluation only (`--skip-train`): skips the optimizer state and casts weights to the run's format."""
    load_optim: bool = True
    save_optim: bool = True
    exit_on_missing: bool = False
    """Exits if `load` has no checkpoint."""
    override_iteration: int | None = None
    """Iteration assigned to a checkpoint from `load`; the run's own checkpoints keep theirs
    (`--override-ckpt-iteration`)."""
    fresh: bool = False
    """Starts at iteration 0 even if `save` has checkpoints."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep (`--keep-last-checkpoints`); None: all."""
    retain_interval: int | None = None
    """Also keeps checkpoints at multiples of this iteration (`--save-retain-interval`)."""
    keep_best: bool = False
    """Also keeps the checkpoint with the lowest validation loss (`--keep-best-checkpoint`)."""
    in_background: bool = False
    """Writes checkpoints alongside training (`--async-save`)."""
    most_failures: int = 3
    """Consecutive failed saves that end the run (`--on-save-failure`)."""
    upcycle: bool = False
    """Loads a dense checkpoint into an MoE model (`--moe-use-upcycling`)."""
    upcycle_granularity: int = 1
    """Experts that each dense MLP is divided into (`--moe-upcycling-granularity`)."""
    hf_interval: int | None = None
    """Iterations between exports as Hugging Face folders; None: no exports."""
    hf_config: Path | None = None
    """Folder whose config.json and tokenizer files are copied into exports."""
