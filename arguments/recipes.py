"""Finds recipes by file name: YAML files of flags in `scripts/recipes`.

Parts shared by several recipes, such as a model architecture, are in `scripts/recipes/parts` and included by `base`.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from types import MappingProxyType

from arguments.errors import FlagErrors, Problem
from arguments.files import FlagFile, display_path, read_files
from arguments.flags import Registry
from arguments.parser import Settings
from megatron_moe.cost_model.hardware import GPUS

_PARTS = "parts"
_COUNTS = ("gpus", "gpus_per_node")
GPU_FIGURES = MappingProxyType(
    {
        "gpu_memory": ("memory_gib", 1.0),
        "gpu_tflops": ("bf16_tflops", 1.0),
        "gpu_bandwidth": ("hbm", 1e9),
        "link_bandwidth": ("nvlink", 1e9),
    }
)
"""Flags and entries of `about` that replace a figure of the GPU type -> (field of `GPU`, its value per unit of the
flag)."""


@dataclass(frozen=True)
class About:
    """Section `about` of a recipe: machine and origin."""

    model: str = ""
    gpu: str = ""
    """GPU type, a value of `--gpu`; empty if any type fits."""
    gpus: int | None = None
    """Number of ranks of the published run; None if it is not stated."""
    gpus_per_node: int | None = None
    """This and the next four fields: value of the flag of the same name with which the file was planned; None if the
    flag was not given."""
    gpu_memory: float | None = None
    gpu_tflops: float | None = None
    gpu_bandwidth: float | None = None
    link_bandwidth: float | None = None
    source: str = ""
    """Publisher of the recipe; empty if this project wrote it."""
    published: str = ""
    """Published measurements, if any."""
    corrections: str = ""
    """Corrections of the published recipe, with reasons."""


def find_recipe(name: str) -> Path | None:
    """Path of a recipe in the repository or the installed package; None if it does not exist."""
    path = _recipes().get(name)
    return Path(path) if path else None


def recipe_names() -> list[str]:
    return sorted(_recipes())


def recipe_folders() -> tuple[Path, ...]:
    """Folders with recipes: `scripts/recipes` of the repository, `share/megatron_moe/recipes` of the installation."""
    repository = Path(__file__).resolve().parents[1] / "scripts" / "recipes"
    return repository, Path(sys.prefix) / "share" / "megatron_moe" / "recipes"


def recipe_files() -> list[tuple[str, Path]]:
    """Returns (name, path) of all recipes and parts. Names are relative paths without suffix:
    `parts/models/mixtral-8x7b`."""
    return sorted((name, Path(path)) for name, path in _files().items())


def _files() -> dict[str, str]:
    """Path of each recipe and part by its name. Strings, because a `Path` per file takes longer than the search."""
    found: dict[str, str] = {}
    for folder in map(str, recipe_folders()):
        for parent, _, files in os.walk(folder):
            prefix = f"{parent[len(folder) + 1 :]}/".lstrip("/").replace(os.sep, "/")
            for file in files:
                if file.endswith(".yaml"):
                    found.setdefault(prefix + file.removesuffix(".yaml"), os.path.join(parent, file))
    return found


def about_of_recipe(name: str, registry: Registry) -> About:
    """Merged `about` sections of a recipe's files; later files override earlier ones. `gpus` defaults to 1."""
    path = find_recipe(name)
    assert path, f"there is no recipe {name}"
    merged = _merged(read_files(path, registry, {}))
    return merged if merged.gpus else replace(merged, gpus=1)


def about_of_command_line(start: Settings, environ: Mapping[str, str]) -> About:
    """Merged `about` sections of the recipe and files named on a command line; later files override earlier ones.

    Raises:
        FlagErrors: an `about` section has an unknown entry or GPU type, or an invalid number.
    """
    name = start.setting("recipe").value
    recipe = find_recipe(str(name)) if name is not None else None
    paths = [*([recipe] if recipe else []), *map(Path, start.setting("config").value)]
    merged = _merged(file for path in paths for file in read_files(path, start.registry, environ))
    return replace(merged, gpus=1) if recipe and not merged.gpus else merged


def _merged(files: Iterable[FlagFile]) -> About:
    entries: dict[str, str] = {}
    problems = []
    for file in files:
        entries |= {name.replace("-", "_"): text for name, text in file.about.items()}
        problems += [
            Problem(what=f"{display_path(file.path)}: {what}", remedy="correct it") for what in _wrong(file.about)
        ]
    if problems:
        raise FlagErrors(problems)
    numbers = {name: int(entries[name]) for name in _COUNTS if name in entries}
    rates = {name: float(entries[name]) for name in GPU_FIGURES if name in entries}
    return About(**{**entries, "gpu": entries.get("gpu", "").lower(), **numbers, **rates})  # type: ignore[arg-type]


def _wrong(entries: Mapping[str, str]) -> Iterator[str]:
    known = [entry.name.replace("_", "-") for entry in fields(About)]
    yield from (f"`about` has no entry {name!r}, only {', '.join(known)}" for name in entries if name not in known)
    gpu = entries.get("gpu", "")
    for name, text in entries.items():
        if name.replace("-", "_") in _COUNTS and not (text.isdecimal() and int(text)):
            yield f"`{name}` of `about` is {text!r}, not an integer of at least 1"
        if name.replace("-", "_") in GPU_FIGURES and not _is_positive(text):
            yield f"`{name}` of `about` is {text!r}, not a positive number"
    if gpu and gpu.lower() not in GPUS:
        yield f"`gpu` of `about` is {gpu!r}, not one of {', '.join(GPUS)}"


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False


def _recipes() -> dict[str, str]:
    """Path of each recipe by its file name without suffix."""
    return {name.rpartition("/")[2]: path for name, path in _files().items() if name.partition("/")[0] != _PARTS}
