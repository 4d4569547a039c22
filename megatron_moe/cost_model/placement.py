"""Nodes and NVLink domains that process groups span, with ranks assigned to nodes in order.

Domains have a fixed number of ranks, so the placement of a group is periodic and large worlds cost no more to compute.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import gcd, prod

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.parallel.grid import ATTENTION_GROUPS, EXPERT_GROUPS, Grid, attention_grid, expert_grid


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Nodes and NVLink domains that the process groups with one name span."""

    size: int
    """Number of ranks per group."""
    nodes: tuple[int, int]
    """(fewest, most) nodes per group."""
    domains: tuple[int, int]
    """(fewest, most) NVLink domains per group."""
    near: float
    """Fraction of a rank's peers that are in its NVLink domain, averaged over ranks."""

    def __str__(self) -> str:
        if self.size == 1:
            return "one rank"
        if self.nodes[1] == 1:
            return "inside a node"
        if self.domains[1] == 1:
            return f"inside an NVLink domain, {_span(self.nodes)} nodes"
        return f"over {_span(self.domains)} NVLink domains, {_span(self.nodes)} nodes"


Axis = tuple[bool, int]
"""Grid axis: (whether a group extends along the axis, size)."""


class Placements:
    """Placements of groups on one kind of GPU, with a cache."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._cache: dict[tuple[Axis, ...], Placement] = {}

    def of_all(self, parallel: ParallelConfig) -> dict[str, Placement]:
        """Placement of every attention and expert group, by name."""
        found = {name: self.of(attention_grid(parallel), axes) for name, axes in ATTENTION_GROUPS}
        return found | {name: self.of(expert_grid(parallel), axes) for name, axes in EXPERT_GROUPS}

    def of(self, grid: Grid, members: Collection[str]) -> Placement:
        """Placement of the groups that extend along the axes `members`."""
        merged: list[Axis] = []
        for name, size in grid.axes:
            inside = name in members
            if size > 1:
                neighbour = merged.pop()[1] if merged and merged[-1][0] == inside else 1
                merged.append((inside, size * neighbour))
        key = tuple(merged)
        if key not in self._cache:
            self._cache[key] = _place(key, self._gpu)
        return self._cache[key]


def _place(axes: Collection[Axis], gpu: GPU) -> Placement:
    size, world_size = (prod(size for inside, size in axes if inside or every) for every in (False, True))
    nodes, _ = _spread(axes, gpu.per_node)
    domains, near = _spread(axes, gpu.domain_ranks(world_size))
    return Placement(size=size, nodes=nodes, domains=domains, near=near)


def _spread(axes: Collection[Axis], domain_ranks: int) -> tuple[tuple[int, int], float]:
    """((fewest, most) domains per group, fraction of a rank's peers in its domain).

    Ranks along an axis are counted for one period only, after which the axis starts at a domain boundary again. Further
    periods, and all slower axes, repeat this pattern.
    """
    members, starts, copies, stride = [0], [0], 1, 1
    for inside, size in axes:
        period = domain_ranks // gcd(stride, domain_ranks)
        counted = size if size % period else period
        offsets = range(0, counted * stride, stride)
        if inside:
            members = [offset + rank for offset in offsets for rank in members]
            copies *= size // counted
        else:
            starts = [offset + rank for offset in offsets for rank in starts]
        stride *= size
    groups = [Counter((start + rank) // domain_ranks for rank in members) for start in starts]
    num_domains = [copies * len(group) for group in groups]
    near_pairs = sum(count * (count - 1) for group in groups for count in group.values())
    pairs = len(groups) * len(members) * (copies * len(members) - 1)
    return (min(num_domains), max(num_domains)), near_pairs / pairs if pairs else 1.0


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
