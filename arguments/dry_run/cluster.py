"""Type and number of the GPUs for which a run is planned, from flags or the `about` section of its recipe or files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from arguments.errors import FlagErrors
from arguments.parser import Settings
from arguments.recipes import GPU_FIGURES, about_of_command_line
from megatron_moe.cost_model.hardware import GPU, GPUS

DEFAULT_GPU = "h100"


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """GPU type and cluster size given on a command line; fields are None if not given."""

    gpu: str | None = None
    gpus: int | None = None
    """`--gpus`, `--world-size`: total number of ranks."""
    nodes: int | None = None
    gpus_per_node: int | None = None
    rates: Mapping[str, Any] = field(default_factory=dict)
    """Figures that replace those of the GPU type, by field of `GPU`."""

    @classmethod
    def of(cls, start: Settings) -> "ClusterFlags":
        """Takes the values from settings parsed from the flags of `pretrain_moe.py`."""
        values = {name: start.setting(name).value for name in ("gpu", "nodes", "gpus_per_node")}
        return cls(gpus=start.setting("world_size").value, **values, rates=rates_of(start))

    @property
    def has_size(self) -> bool:
        return self.gpus is not None or self.nodes is not None


def rates_of(start: Settings) -> dict[str, float]:
    """Specifications of the GPU that flags such as `--gpu-memory` override: field of `GPU` -> value in its unit. Flags
    that are not given are left out."""
    return _rates(lambda flag: start.setting(flag).value)


def _rates(value_of: Callable[[str], Any]) -> dict[str, float]:
    given = {field: (value_of(flag), unit) for flag, (field, unit) in GPU_FIGURES.items()}
    return {field: value * unit for field, (value, unit) in given.items() if value is not None}


def about_lines(gpu: GPU, num_gpus: int) -> list[str]:
    """Lines of a section `about` from which `cluster_of` returns the same GPU and number of ranks."""
    usual = GPUS[gpu.kind]
    lines = ["about:", f"  gpu: {gpu.kind}", f"  gpus: {num_gpus}"]
    if gpu.per_node != usual.per_node:
        lines.append(f"  gpus-per-node: {gpu.per_node}")
    for flag, (name, unit) in GPU_FIGURES.items():
        value = getattr(gpu, name)
        if value != getattr(usual, name):
            lines.append(f"  {flag.replace('_', '-')}: {value / unit:.12g}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPU type and size of the cluster of a run. All nodes have `ranks_per_node` ranks, except that the last may have
    fewer."""

    gpu: GPU
    """GPU type, with `per_node` and `nvlink_domain` adjusted to this cluster."""
    world_size: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)


def cluster_of(
    flags: ClusterFlags, start: Settings, environ: Mapping[str, str], *, launched: int = 1, otherwise: int | None = 1
) -> Cluster:
    """Determines the cluster for which a command line is planned.

    Args:
        flags: sizes given on the command line.
        start: settings that name the recipe and files. Their `about` sections supply sizes that `flags` lacks, and
            figures of the GPU unless `flags` name its type.
        environ: environment variables, which are substituted into files.
        launched: number of ranks started by a launcher; if more than 1, it overrides the number in `about`.
        otherwise: number of ranks if flags, launcher and files do not set it; None means all ranks of one node.

    Raises:
        FlagErrors: the sizes contradict each other, or an `about` section is invalid.
    """
    about = about_of_command_line(start, environ)
    rates = {**({} if flags.gpu else _rates(partial(getattr, about))), **flags.rates}
    gpu = replace(GPUS[flags.gpu or about.gpu or DEFAULT_GPU], **rates, is_custom=bool(rates))
    total = launched if launched > 1 else about.gpus
    usual = (None if flags.gpu else about.gpus_per_node) or gpu.per_node
    per_node = flags.gpus_per_node or min(usual, flags.gpus or total or usual)
    if flags.gpus and flags.nodes:
        world_size, per_node = flags.gpus, flags.gpus_per_node or max(1, flags.gpus // flags.nodes)
        if flags.nodes * per_node != world_size:
            raise _contradiction(flags)
    elif flags.nodes:
        world_size = flags.nodes * per_node
    elif flags.gpus_per_node and not flags.gpus:
        world_size = -(-(total or 1) // per_node) * per_node
    else:
        world_size = flags.gpus or total or otherwise or per_node
    if per_node != gpu.per_node and world_size > min(per_node, gpu.per_node):
        domain = max(1, gpu.nvlink_domain * per_node // gpu.per_node)
        gpu = replace(gpu, per_node=per_node, nvlink_domain=domain)
    return Cluster(gpu=gpu, world_size=world_size, ranks_per_node=min(per_node, world_size))


def _contradiction(flags: ClusterFlags) -> FlagErrors:
    given = [f"--gpus {flags.gpus}", f"--nodes {flags.nodes}"]
    given += [f"--gpus-per-node {flags.gpus_per_node}"] if flags.gpus_per_node else []
    remedy = "leave out one of them: gpus = nodes x gpus-per-node"
    return FlagErrors.of(f"{' and '.join(given)} contradict each other", remedy)
