"""A layout folded to few ranks: the axes that had more than one rank keep more than one where the ranks allow it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from megatron_moe.parallel.grid import FoldError

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


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A layout to fold."""

    sizes: Sizes
    """At full size. An axis of one rank stays one, but for dp and edp, which take what is left."""
    etp_is_tp: bool = False
    """Experts are split like everything else, because nobody said otherwise."""
    two_levels: bool = False
    """Of context-parallel ranks; they need four."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Sizes of axes that are not to be folded."""


def fold(wish: Wish, num_ranks: int) -> Sizes:
    """The sizes on `num_ranks` ranks that keep the most axes; of those with the same, the ones that split least.

    Raises FoldError when the fixed sizes do not fit.
    """
    found = min(_folds(wish, num_ranks), key=lambda sizes: _rank(sizes, wish), default=None)
    if found is None:
        raise FoldError(f"the sizes behind --proxy do not fit {num_ranks} ranks: {_said(wish.fixed)}")
    return found


def smallest_fold(wish: Wish, most: int) -> tuple[int, Sizes]:
    """(ranks, sizes) of at most `most` ranks that keep the most axes, on as few ranks as that takes.

    Raises FoldError when the fixed sizes fit no such number of ranks.
    """
    possible = [ranks for ranks in range(1, most + 1) if any(_folds(wish, ranks))] or [most]
    folds = {ranks: fold(wish, ranks) for ranks in possible}
    ranks = max(folds, key=lambda ranks: (_worth(folds[ranks], wish), -ranks))
    return ranks, folds[ranks]


def lost_axes(wanted: Sizes, found: Sizes) -> list[str]:
    """Axes that had more than one rank and have one now."""
    return [axis for axis, size in wanted.axes.items() if size > 1 and found.axes[axis] == 1]


def _rank(sizes: Sizes, wish: Wish) -> tuple[int, int, tuple[int, ...]]:
    splits = sizes.tp + sizes.cp + sizes.pp + sizes.ep + sizes.etp
    return -_worth(sizes, wish), splits, tuple(sizes.axes.values())


def _worth(sizes: Sizes, wish: Wish) -> int:
    kept = sum(weight for axis, weight in _WEIGHTS if wish.sizes.axes[axis] > 1 and sizes.axes[axis] > 1)
    return kept + _TWO_LEVELS * (wish.two_levels and sizes.cp >= 4)


def _folds(wish: Wish, num_ranks: int) -> Iterator[Sizes]:
    def choices(axis: str, ranks: int) -> list[int]:
        fixed = wish.fixed.get(axis)
        if fixed is not None:
            return [fixed] if ranks % fixed == 0 else []
        return [size for size in range(1, min(ranks, wish.sizes.axes[axis]) + 1) if ranks % size == 0]

    for pp in choices("pp", num_ranks):
        stage = num_ranks // pp
        for tp in choices("tp", stage):
            for cp in choices("cp", stage // tp):
                for etp in [tp] if wish.etp_is_tp else choices("etp", stage):
                    for ep in choices("ep", stage // etp):
                        dp, edp = stage // (tp * cp), stage // (etp * ep)
                        yield Sizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp, edp=edp)


def _said(fixed: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in fixed.items())
