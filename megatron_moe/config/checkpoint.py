"""Saving and loading checkpoints."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
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
