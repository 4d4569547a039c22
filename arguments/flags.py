"""Registry of all flags, searchable by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

from arguments.flag import Flag, differs, flags_of, new_flag
from arguments.groups.attention import AttentionFlags
from arguments.groups.checkpoint import CheckpointFlags
from arguments.groups.data import DataFlags
from arguments.groups.fsdp import FSDPFlags
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
from arguments.values import FilePath
from megatron_moe.config.registry import FLAGS
from megatron_moe.cost_model.hardware import GpuKind

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """Input files, reports and cluster size. These flags are allowed on the command line only."""

    config: tuple[FilePath, ...] = new_flag((), essential=True)
    """YAML files with flags; later files override earlier ones, and the command line overrides all."""
    recipe: str | None = new_flag(None, essential=True)
    """Recipe to use, a file in scripts/recipes that is read before `--config`; docs/recipes.md lists all recipes."""
    print_config: Literal["yaml", "flags", "json"] | None = new_flag(None, essential=True, bare="yaml")
    """Print all values (json, or yaml with origins), or the given flags as a command line (flags), and exit."""
    from_hf_config: FilePath | None = new_flag(None)
    """Folder with a Hugging Face config.json from which model flags are derived. Flags in files and on the command line
    override the derived ones."""
    check_against_hf: FilePath | None = new_flag(None)
    """Folder with a Hugging Face config.json. Compare this config with the model that the flags define, print the
    differences, and exit with code 0 if there are none and 2 otherwise."""
    dry_run: Literal["text", "json"] | None = new_flag(None, essential=True, bare="text")
    """Report the parallel groups, pipeline stages, memory, schedule, communication and step time of the run, and exit.
    Exit code 0: the run would start; 15: an input or a feature is missing; 2: the flags are wrong."""
    check_packages: bool = new_flag(False)
    """With `--dry-run` or `--fake-init-process-group`: also check which of the Python packages that the flags select
    are installed on this machine. Without it, the result does not depend on them."""
    world_size: int | None = new_flag(None, least=1, names=("--gpus",))
    """Number of ranks of a dry run or an emulation. Default: from `--nodes`, the launcher, or entry `gpus` of
    section `about` in the recipe or file. A run started with a different number of ranks is rejected."""
    nodes: int | None = new_flag(None, least=1)
    """Number of nodes of a dry run or an emulation; see `--world-size`."""
    gpus_per_node: int | None = new_flag(None, least=1)
    """Ranks per node. Default: the number of GPUs per node for the `--gpu` type, but at most the number of ranks."""
    gpu: GpuKind | None = new_flag(None)
    """GPU type of a dry run or an emulation. Default: `gpu` of section `about` in the recipe or file, otherwise
    h100."""
    gpu_memory: float | None = new_flag(None, least=0.1)
    """Memory in GiB of the GPU of a dry run or an emulation. Default: that of the `--gpu` type."""
    gpu_tflops: float | None = new_flag(None, least=0.1)
    """Peak dense bf16 TFLOP/s of the GPU of a dry run; rates of other formats change in proportion. Default: that of
    the `--gpu` type."""
    gpu_bandwidth: float | None = new_flag(None, least=1)
    """Memory bandwidth of the GPU of a dry run, in GB/s. Default: that of the `--gpu` type."""
    link_bandwidth: float | None = new_flag(None, least=0.1)
    """Bandwidth between the GPUs of a host in a dry run, in GB/s per direction. Default: that of the `--gpu` type."""
    tokens: float | None = new_flag(None, least=1)
    """Number of tokens for which a dry run estimates time and cost. Default: those of `--train-iters` or
    `--train-samples`."""
    gpu_hour_price: float | None = new_flag(None, least=0)
    """Price of a GPU hour, in any currency, for the estimated cost of a dry run."""
    fake_process_group: bool = differs(
        False,
        "runs two steps without a dataset, reports memory by category, and exits",
        names=("--fake-init-process-group",),
    )
    """Emulate one rank of a cluster without starting the other ranks. On a GPU, the rank runs real training steps;
    without a GPU, it runs them on meta tensors."""
    emulate_rank: str = new_flag("own")
    """With `--fake-init-process-group`: number of the rank to emulate, `own` for the rank set by the launcher (or 0),
    or `all` for the first rank of every pipeline stage."""
    emulate_imbalance: float = new_flag(1.0, least=0)
    """With `--fake-init-process-group`: load of the rank's experts as a multiple of their load with balanced
    routing."""
    emulate_json: FilePath | None = new_flag(None)
    """With `--fake-init-process-group`: JSON file to which the results are written."""
    emulate_plot: FilePath | None = new_flag(None)
    """With `--fake-init-process-group`: PNG file to which a plot of memory use during the step is written."""
    proxy: bool = new_flag(False, essential=True)
    """Shrink the run to fit this machine: fewer layers, experts and ranks, smaller widths, random tokens, 5 iterations,
    but the same code paths. Flags given after `--proxy` are not changed. The run prints every change."""
    allow_ignored_flags: bool = new_flag(False)
    """Ignore unavailable flags that do not affect results, with a warning, instead of rejecting them."""
    allow_environment: tuple[str, ...] = new_flag(())
    """Environment variables that files may set in addition to those of the libraries that a run uses."""


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
    FSDPFlags,
    PipelineFlags,
    RecomputeFlags,
    OffloadFlags,
):
    """Values of all flags, by name. Used only in package `arguments`; the program receives a `RunPlan`."""


GROUPS: Mapping[str, type] = MappingProxyType(
    {group.__name__.removesuffix("Flags").lower(): group for group in Flags.__bases__}
)
"""Maps group names to the dataclasses with the flags of the group, e.g. `model` to `ModelFlags`."""


def groups() -> dict[str, type]:
    """`GROUPS`, followed by the groups that imported files have registered."""
    return {**GROUPS, **{name: FLAGS.get(name) for name in FLAGS.names()}}


def flag_values(values: Mapping[str, Any]) -> Flags:
    """Flags with the given values, which may include those of registered groups."""
    registered = [name for name in values if name not in _PRODUCT_FLAGS]
    if not registered:
        return Flags(**values)
    kind = make_dataclass("Flags", [(name, Any) for name in registered], bases=(Flags,), frozen=True, kw_only=True)
    return cast(Flags, kind(**values))


_PRODUCT_FLAGS = frozenset(entry.name for entry in fields(Flags))


def from_flags(function: Callable[..., T], flags: Flags, *, prefix: str = "", **values: Any) -> T:
    """Calls a config class or function with the keyword arguments `values`. Every other parameter receives the value of
    the flag with its name after `prefix`, or else of the flag with its name, if there is one. A `Path | None` parameter
    receives a path, or None for an empty text."""
    parameters = _flag_parameters(function, prefix, FLAGS.names())
    named = {name: convert(getattr(flags, flag)) for name, flag, convert in parameters if name not in values}
    return function(**named, **values)


@cache
def _flag_parameters(
    function: Callable[..., Any], prefix: str, registered: tuple[str, ...]
) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Returns (name, flag, conversion of its value) for each parameter of `function` that receives the value of a flag.
    `registered`: names of the groups that imported files have registered."""
    names = _PRODUCT_FLAGS.union(entry.name for group in registered for entry in fields(FLAGS.get(group)))
    return tuple(
        (name, flag, _path if parameter.annotation == Path | None else _unchanged)
        for name, parameter in signature(function).parameters.items()
        if (flag := prefix + name if prefix + name in names else name) in names
    )


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Registry:
    """All declared flags, by name and by spelling."""

    flags: Mapping[str, Flag]
    """Maps each flag name, with underscores, to its flag."""
    spellings: Mapping[str, tuple[Flag, bool]]
    """Maps each accepted option, with dashes, to its flag and a bool: False if the option turns the flag off, else
    True."""

    @staticmethod
    def declared() -> "Registry":
        """Registry of all groups."""
        return _registry_of(tuple(groups().items()))

    @classmethod
    def of_flags(cls, flags: Iterable[Flag]) -> "Registry":
        """Builds the registry of the given flags. Asserts that no two flags share a name or a spelling."""
        by_name: dict[str, Flag] = {}
        spellings: dict[str, tuple[Flag, bool]] = {}
        for entry in flags:
            assert entry.name not in by_name, f"flag {entry.name} is declared twice"
            by_name[entry.name] = entry
            for is_on, options in ((True, entry.on_options), (False, entry.off_options)):
                for option in map(with_dashes, options):
                    known = spellings.setdefault(option, (entry, is_on))
                    assert known == (entry, is_on), f"{option} means both {known[0].name} and {entry.name}"
        return cls(MappingProxyType(by_name), MappingProxyType(spellings))

    def find(self, option: str) -> tuple[Flag, bool] | None:
        """Looks up an option written with dashes or underscores; returns its entry in `spellings`, None if unknown."""
        return self.spellings.get(with_dashes(option))


@lru_cache(maxsize=2)
def _registry_of(named: tuple[tuple[str, type], ...]) -> Registry:
    """Registry of the flags of groups. A command line needs it several times, and building it takes 20 ms."""
    return Registry.of_flags(entry for name, group in named for entry in flags_of(name, group))


def with_dashes(option: str) -> str:
    """Option with dashes instead of underscores."""
    return option.replace("_", "-")
