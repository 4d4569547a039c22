"""Files and folders that a run reads, checked without reading them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import CheckpointSpec, DataSpec

_HUGGING_FACE = "hf:"


def missing_inputs(plan: RunPlan) -> tuple[str, ...]:
    """A sentence per flag that names something that does not exist here, and without which the run would not start."""
    found = [*_data_files(plan.data), *_checkpoints(plan.checkpoint)]
    return tuple(f"{sentence}; correct it, or start the run where it exists" for sentence in found)


def _data_files(data: DataSpec) -> Iterator[str]:
    if data.mock:
        return
    for flag, words in (
        ("--data-path", data.blend),
        ("--train-data-path", data.train),
        ("--valid-data-path", data.valid),
        ("--test-data-path", data.test),
    ):
        files = [f"{prefix}{ending}" for prefix in _prefixes(words) for ending in (".idx", ".bin")]
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            yield f"{len(missing)} of {len(files)} files of {flag} do not exist, such as {missing[0]}"


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Without weights, which `checks/data.py` has found to be in turn with prefixes or absent."""
    try:
        float(words[0] if words else "")
    except ValueError:
        return words
    return words[1::2]


def _checkpoints(spec: CheckpointSpec) -> Iterator[str]:
    """Folders that a first start reads; a later one resumes from the checkpoints of `save`."""
    resumes = spec.save is not None and not spec.fresh and any(spec.save.glob("iter_*"))
    if not resumes:
        has_load = spec.load is not None and _folder(spec.load).is_dir()
        published = spec.load is not None and spec.load.startswith(_HUGGING_FACE)
        needed = spec.exit_on_missing or spec.finetune or spec.weights_only or spec.upcycle or not spec.load_optim
        if spec.load is not None and not has_load and (published or (needed and spec.pretrained is None)):
            yield f"--load {spec.load} does not exist"
        if spec.pretrained is not None and not has_load and not _folder(spec.pretrained).is_dir():
            yield f"--pretrained-checkpoint {spec.pretrained} does not exist"
    if spec.hf_interval and spec.hf_config is not None and not spec.hf_config.is_dir():
        yield f"--save-hf-config {spec.hf_config} does not exist"


def _folder(location: str) -> Path:
    return Path(location.removeprefix(_HUGGING_FACE))
