"""Recipes: files of flags that are found by name, and what each says about itself.

A recipe lies in a folder of its family below `scripts/recipes` and is called by its file's name. What several recipes
share, such as the architecture of a model, is written once in `scripts/recipes/parts` and named as their `base`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from arguments.files import read_files
from arguments.flags import Registry

_PARTS = "parts"


@dataclass(frozen=True)
class About:
    """The machine and the origin of a recipe, the section `about` of its files."""

    model: str = ""
    gpu: str = ""
    """A kind of `--gpu`; empty: any machine."""
    gpus: int = 1
    """Ranks of the published run."""
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
    beside = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
    return beside, Path(sys.prefix) / "share" / "megatron_moe" / "recipes"


def recipe_files() -> list[tuple[str, Path]]:
    """Recipes and the parts they share, each under its path below the folder: `parts/models/mixtral-8x7b`."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return sorted(found.items())


def about(name: str, registry: Registry) -> About:
    """What the files of a recipe say about it, the last word on each point."""
    path = find_recipe(name)
    assert path, f"there is no recipe {name}"
    said: dict[str, str] = {}
    for file in read_files(path, registry, {}):
        said |= file.about
    return About(**{**said, "gpus": int(said.get("gpus", 1))})  # type: ignore[arg-type]


def _recipes() -> dict[str, Path]:
    return {path.stem: path for name, path in recipe_files() if name.partition("/")[0] != _PARTS}
