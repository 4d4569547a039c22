"""Metrics recorded inside modules and reduced once per log interval.

Recording adds to tensors on the device and never waits for the host. `take` makes one collective per kind of
reduction and one host read.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Reduction = Literal["mean", "sum", "max"]


@dataclass
class _Entry:
    reduction: Reduction
    value: Tensor
    count: Tensor


@dataclass
class Tally:
    """Sums and counts of named metrics, each optionally per layer."""

    entries: dict[tuple[str, int | None], _Entry] = field(default_factory=dict)

    def record(
        self, name: str, value: Tensor, *, layer: int | None = None, count: Tensor | None = None, reduction: Reduction = "mean"
    ) -> None:
        """Adds `value` (a scalar or a vector) under `name`.

        With "mean" the reported figure is sum of values / sum of counts (count: number of calls unless given); with
        "sum" and "max" the sum and the largest value over microbatches and data-parallel ranks.
        """
        raise NotImplementedError
