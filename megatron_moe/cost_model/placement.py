"""Nodes and NVLink domains of process groups, with ranks assigned to nodes in order.

The ranks of a group are sums of one multiple of a stride per axis. Their distribution over domains of fixed size
depends only on the first rank modulo that size, and residues are periodic, so the world size does not affect the cost.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.parallel.grid import ATTENTION_GROUPS, EXPERT_GROUPS, Grid, attention_grid, expert_grid


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Location of the ranks of all groups with one name."""

    size: int
    """Ranks per group."""
    nodes: tuple[int, int]
    """(fewest, most) nodes per group."""
    domains: tuple[int, int]
    """(fewest, most) NVLink domains per group."""
    near: float
    """Share of a rank's peers in its NVLink domain, averaged over ranks."""

    def __str__(self) -> str:
        if self.size == 1:
            return "one rank"
        if self.nodes[1] == 1:
            return "inside a node"
        if self.domains[1] == 1:
            return f"inside an NVLink domain, {_span(self.nodes)} nodes"
        return f"over {_span(self.domains)} NVLink domains, {_span(self.nodes)} nodes"


Axis = tuple[bool, int]
"""(whether a group extends along it, size)."""


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


@dataclass(frozen=True)
class _Progression:
    """`number` ranks, `stride` apart."""

    stride: int
    number: int


@dataclass(frozen=True)
class _Occupied:
    """Domains of an ascending list of ranks."""

    first: int
    """Domain of the first rank."""
    last: int
    """Domain of the last rank."""
    num_first: int
    """Ranks in the first domain."""
    num_last: int
    """Ranks in the last domain."""
    num_domains: int
    pairs: int
    """Ordered pairs of distinct ranks in the same domain."""

    def then(self, other: "_Occupied") -> "_Occupied":
        """Concatenation with `other`, whose ranks are all larger."""
        meet = self.last == other.first
        return _Occupied(
            first=self.first,
            last=other.last,
            num_first=self.num_first + other.num_first * (meet and self.first == self.last),
            num_last=other.num_last + self.num_last * (meet and other.first == other.last),
            num_domains=self.num_domains + other.num_domains - meet,
            pairs=self.pairs + other.pairs + 2 * self.num_last * other.num_first * meet,
        )

    def shifted(self, domains: int) -> "_Occupied":
        return replace(self, first=self.first + domains, last=self.last + domains)

    def repeated(self, times: int, distance: int) -> "_Occupied":
        """Concatenation of `times` copies, `distance` domains apart."""
        if times == 1:
            return self
        half = self.repeated(times // 2, distance)
        both = half.then(half.shifted(times // 2 * distance))
        return both.then(self.shifted((times - 1) * distance)) if times % 2 else both


def _place(axes: Collection[Axis], gpu: GPU) -> Placement:
    inside: list[_Progression] = []
    outside: list[_Progression] = []
    world_size = 1
    for is_inside, size in axes:
        (inside if is_inside else outside).append(_Progression(world_size, size))
        world_size *= size
    size = 1
    for each in inside:
        size *= each.number
    nodes = _by_first_rank(inside, outside, gpu.per_node)
    domains = _by_first_rank(inside, outside, gpu.domain_ranks(world_size))
    pairs = sum(number * found.pairs for found, number in domains)
    all_pairs = world_size * (size - 1)
    return Placement(
        size=size,
        nodes=_extremes(found.num_domains for found, _ in nodes),
        domains=_extremes(found.num_domains for found, _ in domains),
        near=pairs / all_pairs if all_pairs else 1.0,
    )


def _extremes(values: Iterable[int]) -> tuple[int, int]:
    found = set(values)
    return min(found), max(found)


def _by_first_rank(
    inside: list[_Progression], outside: list[_Progression], domain_ranks: int
) -> list[tuple[_Occupied, int]]:
    """(domains of a group, number of such groups) for each residue of a group's first rank."""
    cache: dict[tuple[int, int], _Occupied] = {}
    residues = _residues(outside, domain_ranks)
    return [(_occupied(inside, start, domain_ranks, cache), number) for start, number in residues.items()]


def _residues(progressions: Iterable[_Progression], modulus: int) -> dict[int, int]:
    """Number of sums of one member per progression, by residue."""
    found = {0: 1}
    for each in progressions:
        period = modulus // gcd(each.stride, modulus)
        whole, rest = divmod(each.number, period)
        sums: dict[int, int] = {}
        for place in range(min(period, each.number)):
            for residue, number in found.items():
                at = (residue + place * each.stride) % modulus
                sums[at] = sums.get(at, 0) + number * (whole + (place < rest))
        found = sums
    return found


def _occupied(
    progressions: list[_Progression], start: int, domain_ranks: int, cache: dict[tuple[int, int], _Occupied]
) -> _Occupied:
    """Domains of all sums of `start` and one member per progression, in order of ascending strides. `cache`: results by
    number of progressions and residue."""
    domain, residue = divmod(start, domain_ranks)
    if not progressions:
        return _Occupied(domain, domain, 1, 1, 1, 0)
    key = len(progressions), residue
    if key not in cache:
        *faster, slowest = progressions
        period = domain_ranks // gcd(slowest.stride, domain_ranks)
        whole, rest = divmod(slowest.number, period)

        def run(first: int, number: int) -> _Occupied:
            places = range(first, first + number)
            found = (_occupied(faster, residue + place * slowest.stride, domain_ranks, cache) for place in places)
            return reduce(_Occupied.then, found)

        pieces = [run(0, period).repeated(whole, period * slowest.stride // domain_ranks)] if whole else []
        pieces += [run(whole * period, rest)] if rest else []
        cache[key] = reduce(_Occupied.then, pieces)
    return cache[key].shifted(domain)


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
