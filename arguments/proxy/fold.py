"""Folds a parallel layout to fewer ranks; axes with several ranks keep at least two ranks where possible."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from megatron_moe.parallel.grid import ParallelSizesError

_WEIGHTS = (("tp", 8), ("cp", 8), ("pp", 8), ("ep", 8), ("etp", 4), ("dp", 2), ("edp", 2))
"""Pairs (axis, points). A fold scores the points of every axis that keeps more than one rank."""
_HIERARCHICAL_CP = 4
"""Points that a fold scores if hierarchical context parallelism keeps two ranks on both levels."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Number of ranks on every axis of the attention grid and the expert grid."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    edp: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one rank"


@dataclass(frozen=True, kw_only=True)
class FoldRequest:
    """Full-size layout to fold, with constraints on the result."""

    sizes: Sizes
    """Full-size layout. Axes of size 1 keep this size, except dp and edp, which take the remaining ranks."""
    etp_is_tp: bool = False
    """True if --expert-tensor-parallel-size is not set, so that it equals the tensor-parallel size."""
    hierarchical_cp: bool = False
    """True if some layers use a2a+p2p, which needs four context-parallel ranks to have two levels."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Axis -> size that the folded layout must have."""


def fold(request: FoldRequest, num_ranks: int) -> Sizes:
    """Returns the sizes with the highest score (`_WEIGHTS`) on `num_ranks` ranks.

    On a tie, the smallest tp + cp + pp + ep + etp wins. Raises ParallelSizesError if the fixed sizes do not fit.
    """
    sizes = min(_folds(request, num_ranks), key=lambda sizes: _rank(sizes, request), default=None)
    if sizes is None:
        fixed = ", ".join(f"{axis} {size}" for axis, size in request.fixed.items())
        raise ParallelSizesError(f"the sizes given after --proxy do not fit {num_ranks} ranks: {fixed}")
    return sizes


def smallest_fold(request: FoldRequest, max_ranks: int) -> tuple[int, Sizes]:
    """Returns the number of ranks and the sizes of the fold with the highest score.

    On a tie, the fewest ranks win. Raises ParallelSizesError if the fixed sizes fit no number of ranks up to
    `max_ranks`.
    """
    possible = [ranks for ranks in range(1, max_ranks + 1) if any(_folds(request, ranks))] or [max_ranks]
    folds = {ranks: fold(request, ranks) for ranks in possible}
    ranks = max(folds, key=lambda ranks: (_score(folds[ranks], request), -ranks))
    return ranks, folds[ranks]


def lost_axes(full: Sizes, folded: Sizes) -> list[str]:
    """Returns the axes that a fold reduced to one rank."""
    return [axis for axis, size in full.axes.items() if size > 1 and folded.axes[axis] == 1]


def _rank(sizes: Sizes, request: FoldRequest) -> tuple[int, int, tuple[int, ...]]:
    splits = sizes.tp + sizes.cp + sizes.pp + sizes.ep + sizes.etp
    return -_score(sizes, request), splits, tuple(sizes.axes.values())


def _score(sizes: Sizes, request: FoldRequest) -> int:
    kept = sum(weight for axis, weight in _WEIGHTS if request.sizes.axes[axis] > 1 and sizes.axes[axis] > 1)
    return kept + _HIERARCHICAL_CP * (request.hierarchical_cp and sizes.cp >= 4)


def _folds(request: FoldRequest, num_ranks: int) -> Iterator[Sizes]:
    full = request.sizes.axes

    def possible_sizes(axis: str, ranks: int) -> list[int]:
        if axis in request.fixed:
            return [request.fixed[axis]] if ranks % request.fixed[axis] == 0 else []
        return [size for size in range(1, min(ranks, full[axis]) + 1) if ranks % size == 0]

    for pp in possible_sizes("pp", num_ranks):
        stage = num_ranks // pp
        for tp in possible_sizes("tp", stage):
            for cp in possible_sizes("cp", stage // tp):
                for etp in [tp] if request.etp_is_tp else possible_sizes("etp", stage):
                    for ep in possible_sizes("ep", stage // etp):
                        dp, edp = stage // (tp * cp), stage // (etp * ep)
                        yield Sizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp, edp=edp)
