"""A list of cells in which every two values that can stand together do.

python -m tests.parity.cover            prints the list for the values that exist today
python -m tests.parity.cover --write    stores it as the golden list
"""

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from tests.parity.dimensions import DIMENSIONS, legal, name_of, pairs, values_of

GOLDEN = Path(__file__).parent.parent / "goldens" / "parity_pairs.txt"
Choice = tuple[str, str]
Pair = tuple[Choice, Choice]


def pairwise_cover() -> tuple[list[str], set[Pair]]:
    """Names of the cells, and the pairs that stand together in no legal cell.

    Greedy: every cell starts from a pair that no cell has yet and takes, dimension by dimension, the value that brings
    the most new pairs.
    """
    wanted = list(dict.fromkeys(all_pairs()))
    covered: set[Pair] = set()
    names: list[str] = []
    impossible: set[Pair] = set()
    for pair in wanted:
        if pair in covered:
            continue
        cell = _completed(dict(pair), covered)
        if cell is None:
            impossible.add(pair)
        else:
            covered.update(pairs(cell))
            names.append(name_of(cell))
    return names, impossible


def all_pairs() -> Iterator[Pair]:
    """Rare values first, so that they meet each other in few cells."""
    for one, other in combinations(sorted(DIMENSIONS), 2):
        for value in reversed(values_of(one)):
            for other_value in reversed(values_of(other)):
                yield (one, value), (other, other_value)


def _completed(start: dict[str, str], covered: set[Pair]) -> dict[str, str] | None:
    """A legal cell that holds `start`, if there is one."""
    if not legal(start):
        return None
    missing = [name for name in DIMENSIONS if name not in start]
    if not missing:
        return start

    def gain(value: str) -> int:
        here = (missing[0], value)
        return sum(tuple(sorted((here, choice))) not in covered for choice in start.items())

    for value in sorted(values_of(missing[0]), key=lambda value: -gain(value)):
        cell = _completed({**start, missing[0]: value}, covered)
        if cell is not None:
            return cell
    return None


if __name__ == "__main__":
    text = "".join(f"{name}\n" for name in pairwise_cover()[0])
    if "--write" in sys.argv:
        GOLDEN.write_text(text)
    else:
        print(text, end="")
