"""Parallel folding: separate grids for attention and experts over the same ranks.

The attention grid has the axes tp, cp, dp and pp, the expert grid etp, ep, edp and pp. Both contain all ranks and have
the same pipelines. `ParallelConfig.order` assigns axes to consecutive ranks; its first axis varies fastest. A group
over a set of axes consists of ranks that have the same coordinates on all other axes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.text import counted


class ParallelSizesError(ValueError):
    """Invalid parallel sizes, e.g. axis sizes that do not divide the world size or grids with different pipelines."""


@dataclass(frozen=True)
class Grid:
    """Grid of ranks. `axes` contains (name, size) of every axis, the fastest-varying axis first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` on every axis, by axis name."""
        indices = {}
        for axis, size in self.axes:
            indices[axis] = rank % size
            rank //= size
        return indices

    def groups(self, members: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups over the axes `members`, with ranks in ascending order. Each rank is in exactly one group."""
        inside = set(members)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            outside = tuple(index for axis, index in at.items() if axis not in inside)
            found.setdefault(outside, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def split_axis(self, axis: str, levels: tuple[tuple[str, int], ...]) -> "Grid":
        """Returns a copy of this grid in which `axis` is split into the axes `levels`: (name, size), fastest-varying
        first. Raises ParallelSizesError if the product of their sizes is not the size of `axis`."""
        size = dict(self.axes)[axis]
        if prod(part for _, part in levels) != size:
            sizes = " x ".join(f"{name} {part}" for name, part in levels)
            raise ParallelSizesError(f"{sizes} is not the size {size} of axis {axis}")
        return Grid(tuple(level for each in self.axes for level in (levels if each[0] == axis else (each,))))


ATTENTION_GROUPS = (
    ("tp", ("tp",)),
    ("cp", ("cp",)),
    ("dp", ("dp",)),
    ("pp", ("pp",)),
    ("dp_cp", ("dp", "cp")),
    ("tp_cp", ("tp", "cp")),
    ("tp_dp_cp", ("tp", "dp", "cp")),
)
EXPERT_GROUPS = (("etp", ("tp",)), ("ep", ("ep",)), ("edp", ("dp",)), ("etp_ep", ("tp", "ep")))


def attention_grid(config: ParallelConfig) -> Grid:
    """Grid of all parameters except experts. Raises ParallelSizesError if the axes do not divide the world size."""
    return _grid(config, {"tp": config.tp, "cp": config.cp, "ep": 1, "pp": config.pp}, "tp {tp} x cp {cp} x pp {pp}")


def expert_grid(config: ParallelConfig) -> Grid:
    """Grid of the expert parameters. Its axes tp, ep, dp and pp have the sizes etp, ep, edp and pp; cp has size 1.
    Raises ParallelSizesError if the axes do not divide the world size."""
    return _grid(config, {"tp": config.etp, "cp": 1, "ep": config.ep, "pp": config.pp}, "etp {tp} x ep {ep} x pp {pp}")


def _grid(config: ParallelConfig, sizes: dict[str, int], formula: str) -> Grid:
    ranks = prod(sizes.values())
    if config.world_size % ranks:
        raise ParallelSizesError(
            f"{formula.format(**sizes)} = {ranks} does not divide the world of {counted(config.world_size, 'rank')}"
        )
    sizes["dp"] = config.world_size // ranks
    return Grid(tuple((axis, sizes[axis]) for axis in config.order.split("-")))


def all_groups(config: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """Rank lists of all process groups by name: groups of both grids, "embedding" (pipeline ranks with a copy of the
    embedding), "world", "etp_ep_intra" and "etp_ep_inter" (etp_ep inside a host, and ranks with the same index on its
    hosts), "cp_a2a" and "cp_p2p" (hierarchical context parallelism), "cp_1", "cp_2", ... (dynamic), and with several
    distributed optimizer instances "dp_cp_inner" and "edp_inner" (shards), "dp_cp_outer" and "edp_outer" (replicas)."""
    attention, expert = attention_grid(config), expert_grid(config)
    groups = {name: attention.groups(axes) for name, axes in ATTENTION_GROUPS}
    groups |= {name: expert.groups(axes) for name, axes in EXPERT_GROUPS}
    if sorted(groups["pp"]) != sorted(expert.groups(("pp",))):
        raise ParallelSizesError(
            f"with the rank order {config.order}, the stages of a pipeline are tp {config.tp} x cp {config.cp} ranks "
            f"apart for attention and etp {config.etp} x ep {config.ep} ranks apart for experts"
        )
    by_host = [split_by_host(ranks, config.ranks_per_host) for ranks in groups["etp_ep"]]
    groups["etp_ep_intra"] = [ranks for hosts in by_host for ranks in hosts]
    groups["etp_ep_inter"] = [ranks for hosts in by_host for ranks in zip(*hosts, strict=True)]
    groups["embedding"] = [group for ranks in groups["pp"] for group in _embedding_groups(config, ranks)]
    if config.cp_sub_axes is not None:
        levels = tuple(zip(("cp_a2a", "cp_p2p"), config.cp_sub_axes, strict=True))
        groups |= {name: attention.split_axis("cp", levels).groups((name,)) for name, _ in levels}
    if config.max_seqlen_per_dp_cp_rank is not None:
        groups |= {f"cp_{degree}": _neighbours(attention, degree) for degree in context_degrees(config.cp)}
    if config.num_distributed_optimizer_instances > 1:
        for name, grid, axes in (("dp_cp", attention, ("cp",)), ("edp", expert, ())):
            cut = _with_replicas(grid, config)
            groups[f"{name}_inner"], groups[f"{name}_outer"] = cut.groups(("inner", *axes)), cut.groups(("outer",))
    groups["world"] = [tuple(range(config.world_size))]
    return groups


def split_by_host(ranks: Sequence[int], ranks_per_host: int | None) -> list[tuple[int, ...]]:
    """Ranks of a group by host, in ascending order. If hosts have different numbers of these ranks, each rank is
    returned as a separate group, so that all groups have equal size."""
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank // ranks_per_host if ranks_per_host else 0, []).append(rank)
    if len({len(members) for members in hosts.values()}) > 1:
        return [(rank,) for rank in ranks]
    return [tuple(members) for members in hosts.values()]


def context_degrees(cp: int) -> list[int]:
    """Degrees of dynamic context parallelism: 1, 2, 4, ..., `cp`. Raises ParallelSizesError if `cp` is not a power of
    two."""
    if cp.bit_count() != 1:
        raise ParallelSizesError(f"dynamic context parallelism: --context-parallel-size {cp} is not a power of two")
    return [1 << exponent for exponent in range(cp.bit_length())]


def _neighbours(attention: Grid, degree: int) -> list[tuple[int, ...]]:
    """Groups of `degree` adjacent ranks on the context-parallel axis."""
    cp = dict(attention.axes)["cp"]
    return attention.split_axis("cp", (("near", degree), ("far", cp // degree))).groups(("near",))


def shards_span_hosts(config: ParallelConfig, *, experts: bool) -> bool:
    """Whether some groups of ranks that shard the weights of experts, or all other weights, span several hosts."""
    if config.ranks_per_host is None or config.world_size <= config.ranks_per_host:
        return False
    stride, block = 1, 1
    for axis, size in _with_replicas(expert_grid(config) if experts else attention_grid(config), config).axes:
        stride *= size
        if axis in ("inner", "cp") and size > 1:
            block = stride
    return config.ranks_per_host % block != 0


def _with_replicas(grid: Grid, config: ParallelConfig) -> Grid:
    """Splits the axis dp into "inner", along which ranks shard weights, and "outer", along which they hold the same
    shard. Raises ParallelSizesError if the number of replicas does not divide dp."""
    number, dp = config.num_distributed_optimizer_instances, dict(grid.axes)["dp"]
    if dp % number:
        raise ParallelSizesError(f"{number} distributed optimizer instances do not divide {dp} data-parallel ranks")
    return grid.split_axis("dp", (("inner", dp // number), ("outer", number)))


def _embedding_groups(config: ParallelConfig, pipeline: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of one pipeline: the ranks with a copy of the embedding, and a group of size 1 for each other rank."""
    indices = (0, config.pp - 1) if config.embedding_ranks is None else config.embedding_ranks
    holders = tuple(dict.fromkeys(pipeline[index] for index in indices))
    return [holders, *((rank,) for rank in pipeline if rank not in holders)]
