"""Checks that the input files and folders of a run exist, without reading them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.data import DataConfig
from megatron_moe.config.run import RunPlan

_HUGGING_FACE = "hf:"


def missing_inputs(plan: RunPlan) -> tuple[str, ...]:
    """Returns one sentence for each flag whose input files or folder do not exist but are needed to start the run."""
    found = [*_data_files(plan.data), *_checkpoints(plan.checkpoint)]
    return tuple(f"{sentence}; correct it, or start the run where it exists" for sentence in found)


def _data_files(data: DataConfig) -> Iterator[str]:
    if data.mock_data:
        return
    for flag, words in (
        ("--data-path", data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ):
        files = [f"{prefix}{ending}" for prefix in _prefixes(words) for ending in (".idx", ".bin")]
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            yield f"{len(missing)} of {len(files)} files of {flag} do not exist, such as {missing[0]}"


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Returns the file prefixes of a data flag. Each prefix may be preceded by a blend weight, which is left out."""
    try:
        float(words[0] if words else "")
    except ValueError:
        return words
    return words[1::2]


def _checkpoints(config: CheckpointConfig) -> Iterator[str]:
    """Yields a sentence for each missing folder. A run that resumes from `--save` needs no `--load` folder."""
    resumes = config.save is not None and not config.fresh and any(config.save.glob("iter_*"))
    if not resumes:
        has_load = config.load is not None and _folder(config.load).is_dir()
        published = config.load is not None and config.load.startswith(_HUGGING_FACE)
        pretrained = config.pretrained_checkpoint
        loads_weights_only = config.finetune or config.skip_train or config.moe_use_upcycling or not config.load_optim
        needed = (config.exit_on_missing_checkpoint or loads_weights_only) and pretrained is None
        if config.load is not None and not has_load and (published or needed):
            yield f"--load {config.load} does not exist"
        if pretrained is not None and not has_load and not _folder(pretrained).is_dir():
            yield f"--pretrained-checkpoint {pretrained} does not exist"
    if config.save_hf_interval and config.save_hf_config is not None and not config.save_hf_config.is_dir():
        yield f"--save-hf-config {config.save_hf_config} does not exist"


def _folder(location: str) -> Path:
    return Path(location.removeprefix(_HUGGING_FACE))
