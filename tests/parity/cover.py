"""Covering arrays of the parity matrix: lists of cells in which every legal pair, or triple, of values occurs.

`python -m tests.parity.cover` prints the pairwise cells.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from tests.parity.dimensions import DIMENSIONS, RULES, Cell, Rule, cell_of, name_of, num_ranks

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "order")
"""Dimensions that the search assigns first, because only all of them together determine whether the grids fold."""
NUM_CANDIDATES = MappingProxyType({2: 12, 3: 4})
"""Number of candidate cells by strength. For each entry of the list, the best candidate is selected."""
FIXED_COST = 3
"""Cost of a cell that does not depend on its size, in microbatches of a rank."""
Choice = tuple[str, str]
"""Pair (dimension, value)."""
Choices = tuple[Choice, ...]
Domains = Mapping[str, tuple[str, ...]]
"""Values that each dimension may still take."""
BITS = MappingProxyType(
    {
        choice: 1 << place
        for place, choice in enumerate((name, value) for name, values in DIMENSIONS.items() for value in values)
    }
)


class Cover(NamedTuple):
    """Covering array, and the combinations of values that it cannot contain."""

    names: tuple[str, ...]
    """Names of the cells."""
    impossible: frozenset[Choices]
    """Combinations of values that occur in no legal cell."""


def cover(strength: int, ranks: int | None = None, *, graphs: bool = False) -> Cover:
    """Returns the cells of `select_cells`, which are computed once per process."""
    return select_cells(strength, ranks, graphs)


@cache
def select_cells(strength: int, ranks: int | None, graphs: bool) -> Cover:
    """Selects cells that contain every legal combination of `strength` values.

    With `ranks`, all cells have that world size. With `graphs`, every cell has CUDA graphs; otherwise no cell has.
    The search is greedy and deterministic: of several cells with the next uncovered combination, the cell with the
    most uncovered combinations is added.
    """
    domains = domains_of(graphs=graphs)
    rules = [rule for rule in RULES if domains.keys() >= set(rule[0])]
    if ranks is not None:
        has_ranks: Rule = (("tp", "cp", "pp", "dp"), lambda cell: num_ranks(cell) == ranks)
        # On GPUs, dropout masks differ from those of the CPU oracle.
        without_dropout: Rule = (("dropout",), lambda cell: cell["dropout"] == "off")
        rules += [has_ranks, without_dropout]
    search = _Search(strength, {name: tuple(rule for rule in rules if name in rule[0]) for name in domains}, domains)
    random = Random(0)
    names: list[str] = []
    impossible: set[Choices] = set()
    for combination in all_combinations(strength, domains):
        if _mask(combination) in search.covered:
            continue
        first = search.cell_with(combination, _shuffled(random, domains))
        if first is None:
            impossible.add(combination)
            continue
        others = (
            search.cell_with(combination, _shuffled(random, domains)) for _ in range(NUM_CANDIDATES[strength] - 1)
        )
        best = max([first, *filter(None, others)], key=search.num_new)
        search.covered.update(_masks(best, strength))
        names.append(name_of(best))
    return Cover(tuple(names), frozenset(impossible))


def cells_of_every_value(names: Iterable[str]) -> list[str]:
    """Selects cells in which every value of every dimension occurs, if it occurs in any of the cells.

    Cells with many values that are not yet covered, few ranks and few microbatches are preferred.
    """
    cells = {name: cell_of(name) for name in names}
    covered = {(dimension, values[0]) for dimension, values in DIMENSIONS.items()}
    taken: list[str] = []

    def gain(name: str) -> float:
        runs = (num_ranks(cells[name]) or 1) * int(cells[name]["accumulation"])
        return len(cells[name].items() - covered) / (FIXED_COST + runs)

    while gain(best := max(cells, key=gain)):
        taken.append(best)
        covered |= cells[best].items()
    return taken


def domains_of(*, graphs: bool) -> Domains:
    """Returns the values of all dimensions; "graphs" has no value "off" if `graphs`, and is absent otherwise."""
    rest = {name: values for name, values in DIMENSIONS.items() if name != "graphs"}
    return {**rest, "graphs": DIMENSIONS["graphs"][1:]} if graphs else rest


def all_combinations(strength: int, domains: Domains) -> Iterator[Choices]:
    """Yields every combination of `strength` values of different dimensions.

    Non-default values come first, so that many of them are covered by the same cells.
    """
    for dimensions in combinations(sorted(domains), strength):
        yield from product(*([(name, value) for value in reversed(domains[name])] for name in dimensions))


def _masks(cell: Cell, strength: int) -> Iterator[int]:
    return map(_mask, combinations(cell.items(), strength))


def _mask(choices: Iterable[Choice]) -> int:
    return sum(BITS[choice] for choice in choices)


def _shuffled(random: Random, domains: Domains) -> list[str]:
    rest = [name for name in domains if name not in AXES]
    return [*random.sample(AXES, len(AXES)), *random.sample(rest, len(rest))]


@dataclass
class _Search:
    """Backtracking search for legal cells with many uncovered combinations."""

    strength: int
    rules_of: Mapping[str, tuple[Rule, ...]]
    domains: Domains
    covered: set[int] = field(default_factory=set)

    def num_new(self, cell: Cell) -> int:
        return sum(mask not in self.covered for mask in _masks(cell, self.strength))

    def cell_with(self, choices: Choices, order: list[str]) -> Cell | None:
        """Returns a legal cell with the choices, or None. The other dimensions are assigned in `order`."""
        cell: dict[str, str] = {}
        domains: Domains | None = self.domains
        for name, value in choices:
            domains = self._narrowed(cell, domains, name, value)
            if domains is None:
                return None
            cell[name] = value
        return self._completed(cell, domains, order)

    def _completed(self, cell: dict[str, str], domains: Domains, order: list[str]) -> Cell | None:
        name = next((name for name in order if name not in cell), None)
        if name is None:
            return cell
        for value in sorted(domains[name], key=self._gain(cell, name)):
            narrowed = self._narrowed(cell, domains, name, value)
            found = None if narrowed is None else self._completed({**cell, name: value}, narrowed, order)
            if found is not None:
                return found
        return None

    def _gain(self, cell: Cell, name: str) -> Callable[[str], int]:
        """Returns a sort key for values of a dimension: minus the number of new combinations that a value adds."""
        before = list(_masks(cell, self.strength - 1))
        return lambda value: -sum(BITS[name, value] | mask not in self.covered for mask in before)

    def _narrowed(self, cell: Cell, domains: Domains, name: str, value: str) -> Domains | None:
        """Returns the domains after `name` is set to `value`, or None if a rule is broken or a domain becomes empty."""
        now, left = {**cell, name: value}, dict(domains)
        if value not in left[name]:
            return None
        for needs, rule in self.rules_of[name]:
            unknown = [each for each in needs if each not in now]
            if not unknown and not rule(now):
                return None
            if len(unknown) == 1:
                (other,) = unknown
                left[other] = tuple(each for each in left[other] if rule({**now, other: each}))
                if not left[other]:
                    return None
        return left


if __name__ == "__main__":
    print("\n".join(cover(2).names))
