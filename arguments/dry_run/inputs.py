"""Checks that the input files and folders of a run exist, without reading them."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from arguments.parser import Settings
from arguments.values import is_number
from megatron_moe.config.checkpoint import HUGGING_FACE, CheckpointConfig
from megatron_moe.config.data import DataConfig
from megatron_moe.config.precision import PrecisionConfig, quantization_recipe
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import libraries
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.resilience.packages import PACKAGES

_ITERATIONS = "iter_*"
"""Glob pattern of the names of checkpoint folders."""


def missing_inputs(plan: RunPlan) -> tuple[str, ...]:
    """Returns one sentence for each flag that names missing input: files or a folder that do not exist, or a folder
    without a checkpoint. Input that is not needed to start the run is not reported."""
    found = [*_data_files(plan.data), *_checkpoints(plan.checkpoint)]
    return tuple(f"{sentence}; correct it, or start the run where it exists" for sentence in found)


def unsupported_formats(precision: PrecisionConfig, gpu: GPU) -> Iterator[str]:
    """Yields a sentence for each FP8 or FP4 recipe for which the GPU has no tensor cores."""
    configs = [precision.low_precision, *(module.config for module in precision.module_precision)]
    for recipe in dict.fromkeys(config.recipe for config in configs if config and not config.emulate):
        least = quantization_recipe(recipe).least_capability
        if least is None:
            yield f"no GPU has tensor cores for the recipe {recipe}; add --emulate-low-precision"
        elif gpu.capability < least:
            needed, found = (".".join(map(str, each)) for each in (least, gpu.capability))
            yield (
                f"the recipe {recipe} needs a GPU of compute capability {needed}, but {gpu.name} has {found}; use "
                "another GPU or recipe, or --emulate-low-precision, which computes the same numbers slowly"
            )


def missing_packages(settings: Settings) -> list[str]:
    """Returns one sentence for each flag that selects a package which is not installed and which nothing replaces."""
    return [
        f"{option} needs the package {package.name}, which is not installed on this machine: {package.install}"
        for package in PACKAGES
        for option, value in package.flags
        if package.module not in libraries() and find_spec(package.module) is None and _selects(settings, option, value)
    ]


def _selects(settings: Settings, option: str, value: str) -> bool:
    flag = settings.registry.flags[option[2:].replace("-", "_")]
    given = settings.setting(flag.name).value if settings.known(flag.name) else None
    return given is not None and value in (flag.text(given), "NAME")


def data_prefixes(data: DataConfig) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the data flags and their file prefixes; nothing if the run has mock data."""
    if data.mock_data:
        return
    yield "--data-path", prefixes_of(data.data_path)
    yield "--train-data-path", prefixes_of(data.train_data_path)
    yield "--valid-data-path", prefixes_of(data.valid_data_path)
    yield "--test-data-path", prefixes_of(data.test_data_path)


def _data_files(data: DataConfig) -> Iterator[str]:
    for flag, prefixes in data_prefixes(data):
        files = [f"{prefix}{ending}" for prefix in prefixes for ending in (".idx", ".bin")]
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            yield f"{len(missing)} of {len(files)} files of {flag} do not exist, such as {missing[0]}"


def prefixes_of(words: Sequence[str]) -> Sequence[str]:
    """Returns the file prefixes of a data flag. Each prefix may be preceded by a blend weight, which is left out."""
    return words[1::2] if words and is_number(words[0]) else words


def _checkpoints(config: CheckpointConfig) -> Iterator[str]:
    """Yields a sentence for each flag whose folder the run needs but which does not exist or holds no checkpoint. A run
    that resumes from `--save` needs no folder to load from; without a checkpoint in `--load`, most runs start from
    random weights (`random_start`)."""
    if not _resumes(config):
        missing = config.load is not None and not _is_loadable(config.load)
        pretrained = config.pretrained_checkpoint
        published = config.load is not None and config.load.startswith(HUGGING_FACE)
        if missing and (published or _needs_load(config)):
            yield f"--load {config.load} {_absent(str(config.load))}"
        if pretrained is not None and (missing or config.load is None) and not _is_loadable(pretrained):
            yield f"--pretrained-checkpoint {pretrained} {_absent(pretrained)}"
    if config.save_hf_interval and config.save_hf_config is not None and not config.save_hf_config.is_dir():
        yield f"--save-hf-config {config.save_hf_config} does not exist"


def random_start(config: CheckpointConfig) -> Iterator[str]:
    """Yields a note if `--load` is given but the run starts from random weights, as in Megatron-LM."""
    load = config.load
    if load is None or load.startswith(HUGGING_FACE) or _resumes(config) or _is_loadable(load):
        return
    if config.pretrained_checkpoint is None and not _needs_load(config):
        yield f"--load {load} {_absent(load)}: the run starts from random weights"


def _resumes(config: CheckpointConfig) -> bool:
    return config.save is not None and not config.fresh and any(config.save.glob(_ITERATIONS))


def _needs_load(config: CheckpointConfig) -> bool:
    """Whether the run is rejected if `--load` has no checkpoint."""
    required = config.exit_on_missing_checkpoint or config.skip_train or config.moe_use_upcycling
    return required and config.pretrained_checkpoint is None


def _is_loadable(location: str) -> bool:
    path = Path(location.removeprefix(HUGGING_FACE))
    if location.startswith(HUGGING_FACE) or path.match(_ITERATIONS):
        return path.is_dir()
    return any(path.glob(_ITERATIONS)) or any(path.glob(f"checkpoints/{_ITERATIONS}"))


def _absent(location: str) -> str:
    path = Path(location.removeprefix(HUGGING_FACE))
    return "holds no checkpoint" if path.exists() else "does not exist"
