"""Lists of cells in which every two values, or every three, that can stand together do.

python -m tests.parity.cover            prints the cover of pairs
python -m tests.parity.cover --write    stores it as the golden list, beside it those of 2 and of 4 ranks and of triples
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from types import MappingProxyType

from tests.parity.dimensions import DIMENSIONS, RULES, Cell, Rule, name_of, num_ranks, values_of

GOLDEN = Path(__file__).parent.parent / "goldens" / "parity_pairs.txt"
GOLDEN_OF_RANKS = MappingProxyType({number: GOLDEN.with_name(f"parity_pairs_{number}_ranks.txt") for number in (2, 4)})
"""The covers of pairs in worlds of so many ranks, for GPUs."""
GOLDEN_TRIPLES = GOLDEN.with_name("parity_triples.txt")
AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "order")
"""Chosen first: that they fold shows when all of them are known."""
NUM_CANDIDATES = MappingProxyType({2: 12, 3: 4})
"""By number of values: cells that are tried for a place in the list. The one with the most new combinations gets it."""
Choice = tuple[str, str]
"""(dimension, value)."""
Choices = tuple[Choice, ...]
Domains = Mapping[str, tuple[str, ...]]
"""The values that a dimension may still take."""


def pairwise_cover(ranks: int | None = None) -> tuple[list[str], set[Choices]]:
    """Names of the cells, and the pairs that stand together in no legal cell; with `ranks`, of so many ranks each."""
    if ranks is None:
        return cover(2)
    of_so_many: Rule = (("tp", "cp", "pp", "dp"), lambda cell: num_ranks(cell) == ranks)
    # other devices draw other masks than the oracle
    without_dropout: Rule = (("dropout",), lambda cell: cell["dropout"] == "off")
    return cover(2, (of_so_many, without_dropout))


def threewise_cover() -> tuple[list[str], set[Choices]]:
    """As `pairwise_cover`, of three values each."""
    return cover(3)


def cover(strength: int, rules: tuple[Rule, ...] = ()) -> tuple[list[str], set[Choices]]:
    """Names of the cells, and the combinations of so many values that no legal cell has. Always the same ones.

    Greedy: of several cells that hold a combination which no cell has yet, the one with the most new ones is taken.
    """
    search = _Search(strength, _by_dimension((*RULES, *rules)))
    random = Random(0)
    names: list[str] = []
    impossible: set[Choices] = set()
    for combination in all_combinations(strength):
        if _mask(combination) in search.covered:
            continue
        first = search.cell_with(combination, _shuffled(random))
        if first is None:
            impossible.add(combination)
            continue
        others = (search.cell_with(combination, _shuffled(random)) for _ in range(NUM_CANDIDATES[strength] - 1))
        cells = [first, *(cell for cell in others if cell is not None)]
        best = max(cells, key=search.num_new)
        search.covered.update(masks(best, strength))
        names.append(name_of(best))
    return names, impossible


def all_combinations(strength: int) -> Iterator[Choices]:
    """Of so many values of different dimensions. Rare values first, so that they meet each other in few cells."""
    for dimensions in combinations(sorted(DIMENSIONS), strength):
        yield from _products(dimensions)


def _products(dimensions: tuple[str, ...]) -> Iterator[Choices]:
    if not dimensions:
        yield ()
        return
    first, *rest = dimensions
    for value in reversed(values_of(first)):
        for others in _products(tuple(rest)):
            yield ((first, value), *others)


def masks(cell: Cell, strength: int) -> Iterator[int]:
    """Every combination of so many choices of a cell, each as the bits of its choices."""
    return map(_mask, combinations(cell.items(), strength))


@cache
def _bit(choice: Choice) -> int:
    choices = [(dimension, value) for dimension, values in DIMENSIONS.items() for value in values]
    return 1 << choices.index(choice)


def _mask(choices: Iterable[Choice]) -> int:
    return sum(map(_bit, choices))


def _by_dimension(rules: tuple[Rule, ...]) -> Mapping[str, tuple[Rule, ...]]:
    return {name: tuple(rule for rule in rules if name in rule[0]) for name in DIMENSIONS}


def _shuffled(random: Random) -> list[str]:
    rest = [name for name in DIMENSIONS if name not in AXES]
    return [*random.sample(AXES, len(AXES)), *random.sample(rest, len(rest))]


@dataclass
class _Search:
    """Looks for legal cells with many combinations that none before had."""

    strength: int
    rules_of: Mapping[str, tuple[Rule, ...]]
    covered: set[int] = field(default_factory=set)

    def num_new(self, cell: Cell) -> int:
        return sum(mask not in self.covered for mask in masks(cell, self.strength))

    def cell_with(self, choices: Choices, order: list[str]) -> Cell | None:
        """A legal cell that holds the choices, if there is one; dimensions are chosen in `order`."""
        cell: dict[str, str] = {}
        domains: Domains | None = {name: values_of(name) for name in DIMENSIONS}
        for name, value in choices:
            assert domains is not None
            domains = self._narrowed(cell, domains, name, value)
            if domains is None:
                return None
            cell[name] = value
        assert domains is not None
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
        """How many new combinations a value brings, with a minus."""
        before = list(masks(cell, self.strength - 1))
        return lambda value: -sum(_bit((name, value)) | mask not in self.covered for mask in before)

    def _narrowed(self, cell: Cell, domains: Domains, name: str, value: str) -> Domains | None:
        """The values that are left once `name` is `value`; None when that breaks a rule, or some dimension has none."""
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


def main(options: list[str]) -> None:
    if "--write" not in options:
        print("\n".join(pairwise_cover()[0]))
        return
    _write(GOLDEN, pairwise_cover()[0])
    for ranks, golden in GOLDEN_OF_RANKS.items():
        _write(golden, pairwise_cover(ranks)[0])
    _write(GOLDEN_TRIPLES, threewise_cover()[0])


def _write(path: Path, names: list[str]) -> None:
    path.write_text("".join(f"{name}\n" for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
