"""A layout folded to few ranks: the axes that had more than one rank keep more than one where the ranks allow it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

_WEIGHTS = (("tp", 8), ("cp", 8), ("pp", 8), ("ep", 8), ("etp", 4), ("dp", 2), ("edp", 2))
"""What it is worth that an axis keeps more than one rank."""
_TWO_LEVELS = 4
"""What it is worth that two levels of context-parallel ranks keep more than one rank each."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Ranks on every axis of both grids."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    edp: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def __str__(self) -> str:
        return " ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one rank"


def fold(wanted: Sizes, num_ranks: int, *, etp_is_tp: bool, two_levels: bool = False) -> Sizes:
    """The sizes on `num_ranks` ranks that keep the most axes; of those with the same, the ones that split least.

    Args:
        wanted: the sizes to fold. An axis of one rank stays one, but for dp and edp, which take what is left.
        etp_is_tp: the experts are split like everything else, because nobody said otherwise.
        two_levels: of context-parallel ranks; they need four.
    """
    return min(_folds(wanted, num_ranks, etp_is_tp), key=lambda sizes: _rank(sizes, wanted, two_levels))


def smallest_fold(wanted: Sizes, most: int, *, etp_is_tp: bool, two_levels: bool = False) -> tuple[int, Sizes]:
    """(ranks, sizes) of at most `most` ranks that keep the most axes, on as few ranks as that takes."""
    folds = {ranks: fold(wanted, ranks, etp_is_tp=etp_is_tp, two_levels=two_levels) for ranks in range(1, most + 1)}
    ranks = max(folds, key=lambda ranks: (_worth(folds[ranks], wanted, two_levels), -ranks))
    return ranks, folds[ranks]


def lost_axes(wanted: Sizes, found: Sizes) -> list[str]:
    """Axes that had more than one rank and have one now."""
    return [axis for axis, size in wanted.axes.items() if size > 1 and found.axes[axis] == 1]


def _rank(sizes: Sizes, wanted: Sizes, two_levels: bool) -> tuple[int, int, tuple[int, ...]]:
    splits = sizes.tp + sizes.cp + sizes.pp + sizes.ep + sizes.etp
    return -_worth(sizes, wanted, two_levels), splits, tuple(sizes.axes.values())


def _worth(sizes: Sizes, wanted: Sizes, two_levels: bool) -> int:
    kept = sum(weight for axis, weight in _WEIGHTS if wanted.axes[axis] > 1 and sizes.axes[axis] > 1)
    return kept + _TWO_LEVELS * (two_levels and sizes.cp >= 4)


def _folds(wanted: Sizes, num_ranks: int, etp_is_tp: bool) -> Iterator[Sizes]:
    for pp in _divisors(num_ranks, wanted.pp):
        stage = num_ranks // pp
        for tp in _divisors(stage, wanted.tp):
            for cp in _divisors(stage // tp, wanted.cp):
                for etp in [tp] if etp_is_tp else _divisors(stage, wanted.etp):
                    for ep in _divisors(stage // etp, wanted.ep):
                        dp, edp = stage // (tp * cp), stage // (etp * ep)
                        yield Sizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp, edp=edp)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
