"""Recipes: files of flags that are found by name, and what each says about itself.

A recipe lies in a folder of its family below `scripts/recipes` and is called by its file's name. What several recipes
share, such as the architecture of a model, is written once in `scripts/recipes/parts` and named as their `base`.
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
    """The machine and the origin of a recipe, the section `about` of its files."""

    model: str = ""
    gpu: str = ""
    """A kind of `--gpu`; empty: any machine."""
    gpus: int | None = None
    """Ranks of the published run; None: not said."""
    source: str = ""
    """Who published it; empty: nobody but this project."""
    published: str = ""
    """What was measured there; empty: no figure was given."""
    mended: str = ""
    """In what it differs from the original, and why."""


def find_recipe(name: str) -> Path | None:
    """The file of a recipe: in the repository, or where the wheel put it."""
    return _recipes().get(name)


def recipe_names() -> list[str]:
    """Every recipe there is."""
    return sorted(_recipes())


def recipe_folders() -> tuple[Path, ...]:
    """Where recipes lie: `scripts/recipes` beside this package, `share/megatron_moe/recipes` of the installation."""
    beside = Path(__file__).resolve().parents[1] / "scripts" / "recipes"
    return beside, Path(sys.prefix) / "share" / "megatron_moe" / "recipes"


def recipe_files() -> list[tuple[str, Path]]:
    """Recipes and the parts they share, each under its path below the folder: `parts/models/mixtral-8x7b`."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return sorted(found.items())


def about(name: str, registry: Registry) -> About:
    """Section `about` of the files of a recipe, the last one on each point; one rank where none gives a number."""
    path = find_recipe(name)
    assert path, f"there is no recipe {name}"
    said = _joined(read_files(path, registry, {}))
    return said if said.gpus else replace(said, gpus=1)


def said_by(start: Settings, environ: Mapping[str, str]) -> About:
    """Sections `about` of the recipe and of the files that a command line names, the last one on each point.

    Raises:
        FlagErrors: one has an unknown entry, GPU or number.
    """
    name = start.setting("recipe").value
    recipe = find_recipe(str(name)) if name is not None else None
    paths = [*([recipe] if recipe else []), *map(Path, start.setting("config").value)]
    said = _joined(file for path in paths for file in read_files(path, start.registry, environ))
    return replace(said, gpus=1) if recipe and not said.gpus else said


def _joined(files: Iterable[FlagFile]) -> About:
    said: dict[str, str] = {}
    problems = []
    for file in files:
        said |= file.about
        problems += [Problem(what=f"{shown(file.path)}: {what}", remedy="correct it") for what in _wrong(file.about)]
    if problems:
        raise FlagErrors(problems)
    gpus = int(said["gpus"]) if "gpus" in said else None
    return About(**{**said, "gpu": said.get("gpu", "").lower(), "gpus": gpus})  # type: ignore[arg-type]


def _wrong(said: Mapping[str, str]) -> Iterator[str]:
    known = [entry.name for entry in fields(About)]
    yield from (f"`about` has no entry {name!r}, but {', '.join(known)}" for name in said if name not in known)
    gpus, gpu = said.get("gpus", "1"), said.get("gpu", "")
    if not gpus.isdecimal() or int(gpus) < 1:
        yield f"`gpus` of `about` is {gpus!r}, not a whole number of at least 1"
    if gpu and gpu.lower() not in GPUS:
        yield f"`gpu` of `about` is {gpu!r}, not one of {', '.join(GPUS)}"


def _recipes() -> dict[str, Path]:
    return {path.stem: path for name, path in recipe_files() if name.partition("/")[0] != _PARTS}
