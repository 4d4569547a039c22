"""Number of nodes and NVLink domains that process groups span if ranks are assigned to nodes in ascending order.

All domains have the same number of ranks, so placements repeat periodically along the ranks. Only one period is
examined, so the computation time does not grow with the world size.
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
    """Placement of all process groups of one name, such as "ep", on nodes and NVLink domains."""

    size: int
    """Number of ranks per group."""
    node_span: tuple[int, int]
    """(minimum, maximum) number of nodes that a group spans."""
    domain_span: tuple[int, int]
    """(minimum, maximum) number of NVLink domains that a group spans."""
    share_in_domain: float
    """Fraction of a group's pairs of ranks whose two ranks are in the same NVLink domain."""

    def __str__(self) -> str:
        if self.size == 1:
            return "one rank"
        if self.node_span[1] == 1:
            return "inside a node"
        if self.domain_span[1] == 1:
            return f"inside an NVLink domain, {_span(self.node_span)} nodes"
        return f"over {_span(self.domain_span)} NVLink domains, {_span(self.node_span)} nodes"


Axis = tuple[bool, int]
"""Axis of the rank grid: (True if process groups extend along the axis, size of the axis)."""


class Placements:
    """Computes and caches the placements of process groups for one kind of GPU."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._cache: dict[tuple[Axis, ...], Placement] = {}

    def placements_of_groups(self, parallel: ParallelConfig) -> dict[str, Placement]:
        """Group name -> placement, for all process groups of attention and of experts."""
        found = {name: self.placement_of(attention_grid(parallel), axes) for name, axes in ATTENTION_GROUPS}
        return found | {name: self.placement_of(expert_grid(parallel), axes) for name, axes in EXPERT_GROUPS}

    def placement_of(self, grid: Grid, members: Collection[str]) -> Placement:
        """Placement of the process groups that extend along the axes `members` (names) of `grid`."""
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
    return Placement(size=size, node_span=nodes, domain_span=domains, share_in_domain=near)


def _spread(axes: Collection[Axis], domain_ranks: int) -> tuple[tuple[int, int], float]:
    """Returns the (minimum, maximum) number of domains that a group spans, and the fraction of a group's rank pairs
    that share a domain. Positions of ranks relative to domain boundaries are periodic along each axis, so only one
    period per axis is examined.
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
