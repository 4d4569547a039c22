"""Parallel folding: the same ranks read as two grids.

The attention grid is (pp, dp, cp, tp), the expert grid (pp, edp, ep, etp). Both cover the same world; the pipeline axis
is common. A rank's coordinates follow from the order of the axes: the first axis varies fastest. One generator makes
every list of groups: ranks that agree on all axes outside a chosen set belong together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megatron_moe.config.exit_codes import counted
from megatron_moe.config.parallel import ParallelConfig


class FoldError(ValueError):
    """The axes do not multiply to the world size, or the two grids do not have the same pipelines."""


@dataclass(frozen=True)
class Grid:
    """Axes with their sizes, fastest first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` on every axis."""
        indices = {}
        for axis, size in self.axes:
            indices[axis] = rank % size
            rank //= size
        return indices

    def groups(self, members: Iterable[str]) -> list[tuple[int, ...]]:
        """Every group over the axes `members`: ranks that agree on the other axes, in order of rank.

        The groups cover the world, each rank exactly once.
        """
        inside = set(members)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            outside = tuple(index for axis, index in at.items() if axis not in inside)
            found.setdefault(outside, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def cut(self, axis: str, levels: tuple[tuple[str, int], ...]) -> "Grid":
        """The same ranks with one axis read as several, fastest first. Their sizes multiply to the axis's."""
        size = dict(self.axes)[axis]
        if prod(part for _, part in levels) != size:
            sizes = " x ".join(f"{name} {part}" for name, part in levels)
            raise FoldError(f"{sizes} is not the size {size} of axis {axis}")
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
EXPERT_GROUPS = (
    ("etp", ("tp",)),
    ("ep", ("ep",)),
    ("edp", ("dp",)),
    ("etp_ep", ("tp", "ep")),
)


def attention_grid(config: ParallelConfig) -> Grid:
    """The grid of everything that is not an expert. Refuses a world that the axes do not divide."""
    return _grid(config, {"tp": config.tp, "cp": config.cp, "ep": 1, "pp": config.pp}, "tp {tp} x cp {cp} x pp {pp}")


def expert_grid(config: ParallelConfig) -> Grid:
    """The grid of the experts. Its data-parallel axis is edp; context parallelism is folded into ep and edp."""
    return _grid(config, {"tp": config.etp, "cp": 1, "ep": config.ep, "pp": config.pp}, "etp {tp} x ep {ep} x pp {pp}")


def _grid(config: ParallelConfig, sizes: dict[str, int], product: str) -> Grid:
    ranks = prod(sizes.values())
    if config.world_size % ranks:
        raise FoldError(
            f"{product.format(**sizes)} = {ranks} does not divide the world of {counted(config.world_size, 'rank')}"
        )
    sizes["dp"] = config.world_size // ranks
    return Grid(tuple((axis, sizes[axis]) for axis in config.order.split("-")))


def all_groups(config: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """Name -> the groups of that name over the whole world, plus "embedding" (first and last stage) and "world";
    with two levels of context parallelism also "cp_a2a" and "cp_p2p", with a dynamic one "cp_1", "cp_2", "cp_4" ..."""
    attention, expert = attention_grid(config), expert_grid(config)
    groups = {name: attention.groups(axes) for name, axes in ATTENTION_GROUPS}
    groups |= {name: expert.groups(axes) for name, axes in EXPERT_GROUPS}
    if sorted(groups["pp"]) != sorted(expert.groups(("pp",))):
        raise FoldError(
            f"in the order {config.order} the stages of a pipeline are tp {config.tp} x cp {config.cp} ranks apart for "
            f"attention and etp {config.etp} x ep {config.ep} ranks apart for experts"
        )
    groups["embedding"] = [group for ranks in groups["pp"] for group in _embedding_groups(config, ranks)]
    if config.cp_sub_axes is not None:
        levels = tuple(zip(("cp_a2a", "cp_p2p"), config.cp_sub_axes, strict=True))
        groups |= {name: attention.cut("cp", levels).groups((name,)) for name, _ in levels}
    if config.max_seqlen_per_rank is not None:
        groups |= {f"cp_{degree}": _neighbours(attention, degree) for degree in context_degrees(config.cp)}
    groups["world"] = [tuple(range(config.world_size))]
    return groups


def context_degrees(cp: int) -> list[int]:
    """Powers of two from 1 to the context-parallel size, which is one."""
    if cp.bit_count() != 1:
        raise FoldError(f"dynamic context parallelism over {cp} ranks: not a power of two")
    return [1 << exponent for exponent in range(cp.bit_length())]


def _neighbours(attention: Grid, degree: int) -> list[tuple[int, ...]]:
    """Groups of `degree` ranks that are next to each other on the context-parallel axis."""
    cp = dict(attention.axes)["cp"]
    return attention.cut("cp", (("near", degree), ("far", cp // degree))).groups(("near",))


def _embedding_groups(config: ParallelConfig, pipeline: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The stages that hold a copy of the embedding share a group; every other one is by itself."""
    indices = (0, config.pp - 1) if config.embedding_ranks is None else config.embedding_ranks
    holders = tuple(dict.fromkeys(pipeline[index] for index in indices))
    return [holders, *((rank,) for rank in pipeline if rank not in holders)]
