"""Registry of all flags, searchable by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from arguments.flag import Flag, close, flags_of, ours
from arguments.groups.attention import AttentionFlags
from arguments.groups.checkpoint import CheckpointFlags
from arguments.groups.data import DataFlags
from arguments.groups.kernels import KernelsFlags
from arguments.groups.logging import LoggingFlags
from arguments.groups.memory import OffloadFlags, RecomputeFlags
from arguments.groups.model import ModelFlags
from arguments.groups.moe import MoEFlags
from arguments.groups.optimizer import OptimizerFlags
from arguments.groups.parallel import ParallelFlags, PipelineFlags
from arguments.groups.precision import PrecisionFlags
from arguments.groups.resilience import ResilienceFlags
from arguments.groups.training import TrainingFlags

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """Input files, reports and cluster size. These flags are allowed on the command line only."""

    config: tuple[str, ...] = ours((), essential=True)
    """YAML files with flags; later files override earlier ones, and the command line overrides all."""
    recipe: str | None = ours(None, essential=True)
    """Name of a recipe, a file below scripts/recipes that is read before `--config`; docs/recipes.md lists them."""
    print_config: Literal["yaml", "flags", "json"] | None = ours(None, essential=True, bare="yaml")
    """Print every value with its origin as a YAML file or as JSON, or the given flags as a command line, and exit."""
    from_hf_config: str | None = ours(None)
    """Folder with a Hugging Face config.json from which model flags are derived; files and the command line override
    them."""
    check_against_hf: str | None = ours(None)
    """Folder with a Hugging Face config.json: compare the model with it, print the differences, and exit with code 2 if
    there are any."""
    dry_run: Literal["text", "json"] | None = ours(None, essential=True, bare="text")
    """Report parallel grids, stages, memory, schedule, communication and step time of the run, and exit. Exit code 0:
    the run would start; 15: an input or a feature is missing; 2: the flags are wrong."""
    world_size: int | None = ours(None, least=1, names=("--gpus",))
    """Number of ranks of a dry run or an emulation. Not set: taken from `--nodes`, the launcher, or `about: gpus` of
    the recipe or file. A run started with a different number of ranks is rejected."""
    nodes: int | None = ours(None, least=1)
    """Number of nodes of a dry run or an emulation; see `--world-size`."""
    gpus_per_node: int | None = ours(None, least=1)
    """Ranks per node. Not set: the number of GPUs in a node of the GPU type, but at most the total number of ranks."""
    gpu: Literal["a100", "h100", "h200", "gh200", "b200", "b300", "gb200", "gb300", "vr200"] | None = ours(None)
    """GPU type of a dry run or an emulation. Not set: `about: gpu` of the recipe or file, else h100."""
    fake_process_group: bool = close(
        False,
        "runs two steps without a dataset, reports memory by category, and exits",
        names=("--fake-init-process-group",),
    )
    """Emulate one rank of a cluster without starting the other ranks: a real step on a GPU; without a GPU, the same
    program on meta tensors."""
    emulate_rank: str = ours("own")
    """With `--fake-init-process-group`: rank to emulate; `own`: the rank set by the launcher, or 0; `all`: one rank of
    every pipeline stage."""
    emulate_imbalance: float = ours(1.0, least=0)
    """With `--fake-init-process-group`: tokens routed to the rank's experts, as a multiple of an even share."""
    emulate_json: str | None = ours(None)
    """With `--fake-init-process-group`: JSON file to which the results are written."""
    emulate_plot: str | None = ours(None)
    """With `--fake-init-process-group`: PNG file to which a plot of memory over the step is written."""
    proxy: bool = ours(False, essential=True)
    """Shrink the run to the available machine: fewer layers, experts and ranks, smaller widths, random tokens, 5
    iterations, but the same code paths. Flags given after `--proxy` are not changed; every change is printed."""
    allow_ignored_flags: bool = ours(False)
    """Ignore unavailable flags that do not affect results, with a warning, instead of rejecting them."""


@dataclass(frozen=True, kw_only=True)
class Flags(
    StartFlags,
    ModelFlags,
    AttentionFlags,
    MoEFlags,
    TrainingFlags,
    OptimizerFlags,
    DataFlags,
    PrecisionFlags,
    CheckpointFlags,
    LoggingFlags,
    KernelsFlags,
    ResilienceFlags,
    ParallelFlags,
    PipelineFlags,
    RecomputeFlags,
    OffloadFlags,
):
    """Values of all flags, by name. Used in `arguments` only; the program receives the `RunPlan`."""


GROUPS: Mapping[str, type] = MappingProxyType(
    {group.__name__.removesuffix("Flags").lower(): group for group in Flags.__bases__}
)
"""Group name -> dataclass with the flags of the group, e.g. `model` -> `ModelFlags`."""


def from_flags(function: Callable[..., T], flags: Flags, **values: Any) -> T:
    """Calls a config class or function with `values`; each other parameter with the name of a flag gets its value.

    For a parameter of type `Path | None`, the text of the flag is converted; an empty text becomes None."""
    named = {name: convert(getattr(flags, name)) for name, convert in _flag_parameters(function) if name not in values}
    return function(**named, **values)


@cache
def _flag_parameters(function: Callable[..., Any]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """(flag, conversion) of every parameter with the name of a flag."""
    names = {entry.name for entry in fields(Flags)}
    return tuple(
        (name, _path if parameter.annotation == Path | None else _unchanged)
        for name, parameter in signature(function).parameters.items()
        if name in names
    )


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Registry:
    """All declared flags, by name and by spelling."""

    flags: Mapping[str, Flag]
    """Flag name with underscores -> flag."""
    spellings: Mapping[str, tuple[Flag, bool]]
    """Accepted option, with dashes -> (flag, whether the option sets the flag or switches it on; False: switches it
    off)."""

    @classmethod
    def declared(cls) -> "Registry":
        return cls.over(entry for name, group in GROUPS.items() for entry in flags_of(name, group))

    @classmethod
    def over(cls, flags: Iterable[Flag]) -> "Registry":
        """Builds the registry of the given flags and asserts that no two share a spelling."""
        by_name: dict[str, Flag] = {}
        spellings: dict[str, tuple[Flag, bool]] = {}
        for entry in flags:
            assert entry.name not in by_name, f"flag {entry.name} is declared twice"
            by_name[entry.name] = entry
            for is_on, options in ((True, entry.on_options), (False, entry.off_options)):
                for option in map(normal, options):
                    known = spellings.setdefault(option, (entry, is_on))
                    assert known == (entry, is_on), f"{option} means both {known[0].name} and {entry.name}"
        return cls(MappingProxyType(by_name), MappingProxyType(spellings))

    def find(self, option: str) -> tuple[Flag, bool] | None:
        """Looks up an option with dashes or underscores; returns its entry in `spellings`, or None."""
        return self.spellings.get(normal(option))


def normal(option: str) -> str:
    """Option with dashes instead of underscores."""
    return option.replace("_", "-")
