"""Finds recipes by file name: YAML files of flags in `scripts/recipes`.

Parts shared by several recipes, such as a model architecture, are in `scripts/recipes/parts` and included by `base`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from arguments.errors import FlagErrors, Problem
from arguments.files import FlagFile, read_files, shown
from arguments.flags import Registry
from arguments.parser import Settings
from megatron_moe.cost_model.hardware import GPUS

_PARTS = "parts"


@dataclass(frozen=True)
class About:
    """Section `about` of a recipe: machine and origin."""

    model: str = ""
    gpu: str = ""
    """GPU type, a value of `--gpu`; empty if any type fits."""
    gpus: int | None = None
    """Number of ranks of the published run; None if it is not stated."""
    source: str = ""
    """Publisher of the recipe; empty if this project wrote it."""
    published: str = ""
    """Published measurements, if any."""
    corrections: str = ""
    """Corrections of the published recipe, with reasons."""


def find_recipe(name: str) -> Path | None:
    """Path of a recipe in the repository or the installed package; None if it does not exist."""
    return _recipes().get(name)


def recipe_names() -> list[str]:
    return sorted(_recipes())


def recipe_folders() -> tuple[Path, ...]:
    """Folders with recipes: `scripts/recipes` of the repository, `share/megatron_moe/recipes` of the installation."""
    repository = Path(__file__).resolve().parents[1] / "scripts" / "recipes"
    return repository, Path(sys.prefix) / "share" / "megatron_moe" / "recipes"


def recipe_files() -> list[tuple[str, Path]]:
    """Returns (name, path) of all recipes and parts. Names are relative paths without suffix:
    `parts/models/mixtral-8x7b`."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return sorted(found.items())


def about(name: str, registry: Registry) -> About:
    """Merged `about` sections of a recipe's files; later files override earlier ones. `gpus` defaults to 1."""
    path = find_recipe(name)
    assert path, f"there is no recipe {name}"
    merged = _merged(read_files(path, registry, {}))
    return merged if merged.gpus else replace(merged, gpus=1)


def about_of(start: Settings, environ: Mapping[str, str]) -> About:
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
        entries |= file.about
        problems += [Problem(what=f"{shown(file.path)}: {what}", remedy="correct it") for what in _wrong(file.about)]
    if problems:
        raise FlagErrors(problems)
    gpus = int(entries["gpus"]) if "gpus" in entries else None
    return About(**{**entries, "gpu": entries.get("gpu", "").lower(), "gpus": gpus})  # type: ignore[arg-type]


def _wrong(entries: Mapping[str, str]) -> Iterator[str]:
    known = [entry.name for entry in fields(About)]
    yield from (f"`about` has no entry {name!r}, only {', '.join(known)}" for name in entries if name not in known)
    gpus, gpu = entries.get("gpus", "1"), entries.get("gpu", "")
    if not gpus.isdecimal() or int(gpus) < 1:
        yield f"`gpus` of `about` is {gpus!r}, not an integer of at least 1"
    if gpu and gpu.lower() not in GPUS:
        yield f"`gpu` of `about` is {gpu!r}, not one of {', '.join(GPUS)}"


def _recipes() -> dict[str, Path]:
    return {path.stem: path for name, path in recipe_files() if name.partition("/")[0] != _PARTS}
