"""All flags: every group, and how they are found by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from arguments.flag import Flag, flag, flags_of
from arguments.groups.attention import AttentionFlags
from arguments.groups.checkpoint import CheckpointFlags
from arguments.groups.data import DataFlags
from arguments.groups.kernels import KernelFlags
from arguments.groups.logging import LoggingFlags
from arguments.groups.model import ModelFlags
from arguments.groups.moe import MoEFlags
from arguments.groups.offload import OffloadFlags
from arguments.groups.optimizer import OptimizerFlags
from arguments.groups.parallel import ParallelFlags
from arguments.groups.pipeline import PipelineFlags
from arguments.groups.precision import PrecisionFlags
from arguments.groups.recompute import RecomputeFlags
from arguments.groups.resilience import ResilienceFlags
from arguments.groups.training import TrainingFlags


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """Files with flags, and questions about flags. (`--help` and `--find` are explained by a plain `--help`.)"""

    config: tuple[str, ...] = flag((), status="ours", essential=True)
    """YAML files with flags; later ones win over earlier ones, and the command line over all."""
    recipe: str | None = flag(None, status="ours", essential=True)
    """Name of a file below scripts/recipes, read before `--config`; docs/recipes.md lists them."""
    print_config: Literal["yaml", "flags", "json"] | None = flag(None, status="ours", essential=True, bare="yaml")
    """Print every value with its origin as a YAML file, or as JSON, or the given flags as a command line, and leave."""
    from_hf_config: str | None = flag(None, status="ours")
    """Folder with a Hugging Face config.json: its model's flags, which files and the command line win over."""
    check_against_hf: str | None = flag(None, status="ours")
    """Folder with a Hugging Face config.json: compare the model with it, print what differs, and leave; exit code 2 if
    anything does."""
    dry_run: Literal["text", "json"] | None = flag(None, status="ours", essential=True, bare="text")
    """Report grids, stages, bytes, schedule, communication and time of the run, and leave; exit code 0: it would start,
    15: an input or a feature is missing, 2: the flags are wrong."""
    world_size: int | None = flag(None, status="ours", least=1, names=("--gpus",))
    """Ranks of a dry run or an emulation. Not set: `--nodes`, the launcher, or `about: gpus` of the recipe or file. A
    run that is started with another number of ranks is refused."""
    nodes: int | None = flag(None, status="ours", least=1)
    """Nodes of a dry run or an emulation, as `--world-size`."""
    gpus_per_node: int | None = flag(None, status="ours", least=1)
    """Ranks of each node. Not set: those of a node of that kind of GPU, or of a smaller recipe."""
    gpu: Literal["a100", "h100", "h200", "gh200", "b200", "b300", "gb200", "gb300", "vr200"] | None = flag(
        None, status="ours"
    )
    """Kind of GPU of a dry run or an emulation. Not set: `about: gpu` of the recipe or file, or h100."""
    fake_process_group: bool = flag(
        False,
        names=("--fake-init-process-group",),
        status="close",
        note="takes two steps without data, tells the memory by category, and leaves",
    )
    """Be one rank of a cluster that is not there: on a GPU a real step without its peers, elsewhere the same program on
    tensors without data."""
    emulate_rank: str = flag("own", status="ours")
    """With `--fake-init-process-group`: a rank of the world, or `all`: one of every pipeline stage. `own`: that of the
    launcher, or 0."""
    emulate_imbalance: float = flag(1.0, status="ours", least=0)
    """With `--fake-init-process-group`: rows for this rank's experts, as a multiple of an even share."""
    emulate_json: str | None = flag(None, status="ours")
    """With `--fake-init-process-group`: file for the figures, as JSON."""
    emulate_plot: str | None = flag(None, status="ours")
    """With `--fake-init-process-group`: file for a picture of memory over the step, as PNG."""
    proxy: bool = flag(False, status="ours", essential=True)
    """Shrink the run to the machine at hand: fewer layers, experts and ranks, less width, random tokens, 5 iterations;
    the same paths. Flags behind it stay as they are; every rewrite is printed."""
    allow_ignored_flags: bool = flag(False, status="ours")
    """Ignore flags that are not available and change no number, with a warning, instead of refusing them."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Every flag's value, by group. Only `arguments` sees it; the program sees the `RunPlan` made from it."""

    start: StartFlags
    model: ModelFlags
    attention: AttentionFlags
    moe: MoEFlags
    training: TrainingFlags
    optimizer: OptimizerFlags
    data: DataFlags
    precision: PrecisionFlags
    checkpoint: CheckpointFlags
    logging: LoggingFlags
    kernels: KernelFlags
    resilience: ResilienceFlags
    parallel: ParallelFlags
    pipeline: PipelineFlags
    recompute: RecomputeFlags
    offload: OffloadFlags

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Flags":
        """From the value of every flag, by name."""
        groups = {
            name: group(**{entry.name: values[entry.name] for entry in fields(group)})
            for name, group in group_classes().items()
        }
        return cls(**groups)


def group_classes() -> dict[str, Any]:
    """The class of every group, by name."""
    return {group.name: group.type for group in fields(Flags)}


@dataclass(frozen=True)
class Registry:
    """All declared flags, by name and by spelling."""

    flags: Mapping[str, Flag]
    """By name with underscores."""
    spellings: Mapping[str, tuple[Flag, bool]]
    """Every accepted option, with dashes only -> its flag, and whether it sets or switches on (True) or off (False)."""

    @classmethod
    def declared(cls) -> "Registry":
        """Of all groups."""
        return cls.over(entry for name, group in group_classes().items() for entry in flags_of(name, group))

    @classmethod
    def over(cls, flags: Iterable[Flag]) -> "Registry":
        """Of given flags. Two flags that share a spelling are a mistake in the groups."""
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
        """The flag behind an option in any spelling, with dashes or underscores."""
        return self.spellings.get(normal(option))


def normal(option: str) -> str:
    """With dashes only."""
    return option.replace("_", "-")
