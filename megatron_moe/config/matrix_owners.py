"""Assignment of whole matrices to data-parallel ranks by the time that their updates take. Does not import torch."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from megatron_moe.config.param_meta import ParamMeta

_MEMORY_BOUND = 300
"""Size of a matrix's smaller dim at which the matmuls of a Muon update take as long as its memory-bound operations.
Five Newton-Schulz iterations take about 25 multiply-adds per element and unit of the dim; the other operations move
about 60 bytes per element (H100: 500 TFLOP/s and 4 TB/s)."""


def matrix_shape(shape: tuple[int, ...], meta: ParamMeta) -> tuple[int, int]:
    """Returns (rows, columns) of one matrix of a parameter or of a stack of experts; a vector is a matrix of one
    row."""
    rows, columns = (1, *(shape if meta.num_experts is None else shape[1:]))[-2:]
    return rows, columns


def update_cost(rows: int, columns: int) -> int:
    """Relative time of the update of one matrix."""
    return rows * columns * (min(rows, columns) + _MEMORY_BOUND)


def assign_matrices_to_owners(costs: Sequence[int], loads: list[float]) -> list[int]:
    """Divides consecutive matrices among owner ranks and returns the index of the first matrix of each owner.

    `loads`: cost that each owner already has from earlier buckets; increased in place by that of its new matrices. An
    owner's share is proportional to the amount by which its load is below the mean load after this bucket, so owners
    that get no matrix of one bucket get matrices of the next one.
    """
    ends = list(accumulate(costs))
    total = ends[-1] if ends else 0
    goal = (sum(loads) + total) / len(loads)
    lacking = [max(0.0, goal - load) for load in loads]
    scale = total / (sum(lacking) or 1.0)
    middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
    edges = accumulate((scale * lack for lack in lacking[:-1]), initial=0.0)
    first = [bisect_left(middles, edge) for edge in edges]
    for owner, (start, end) in enumerate(zip(first, [*first[1:], len(costs)], strict=True)):
        loads[owner] += sum(costs[start:end])
    return first
