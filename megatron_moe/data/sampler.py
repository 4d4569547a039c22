"""Batch size schedule and sample order, as pure functions of the seed and the number of consumed samples."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_moe.config.training import BatchConfig


class BatchSchedule:
    """Global batch size, in microbatches of all data-parallel ranks, by consumed samples (`BatchConfig.size_at`)."""

    def __init__(self, batch: BatchConfig, data_parallel: int) -> None:
        self.micro = batch.micro_batch_size
        self.data_parallel = data_parallel
        self.full = batch.global_batch_size
        self.global_batch = batch.size_at
        """Sequences of the step that begins after a number of consumed samples."""

    def num_microbatches(self, consumed: int) -> int:
        """Microbatches of every rank in the step that begins after `consumed` samples."""
        size, micro_step = self.global_batch(consumed), self.micro * self.data_parallel
        assert size and size % micro_step == 0, (
            f"{size} sequences are no multiple of {self.micro} x {self.data_parallel}"
        )
        return size // micro_step


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Mapping from the position in the training order to the sample of the data set.

    "single" is the identity; "cyclic" permutes every pass over the data set by a generator keyed by (seed, pass). Both
    are independent of the layout, the batch size and resumption.
    """

    kind: Literal["single", "cyclic"]
    num_samples: int
    seed: int
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached permutation of the last pass; drawing that of a large data set takes longer than a step."""

    @property
    def end(self) -> int | None:
        """Number of positions, or None if unlimited."""
        return self.num_samples if self.kind == "single" else None

    def fingerprint(self, samples: str) -> str:
        """Fingerprint of this order of a data set with fingerprint `samples`, without the length for "single": a longer
        run continues the same order."""
        return samples if self.kind == "single" else f"{self.kind}-{self.num_samples}-{self.seed}-{samples}"

    def indices(self, consumed: np.ndarray) -> np.ndarray:
        """Sample indices (int64) of the positions `consumed` (int64, any shape)."""
        if self.kind == "single":
            return consumed
        passes, places = np.divmod(consumed, self.num_samples)
        out = np.empty_like(consumed)
        for number in np.unique(passes):
            here = passes == number
            out[here] = self._permutation(int(number))[places[here]]
        return out

    def _permutation(self, number: int) -> np.ndarray:
        permutation = self._drawn.get(number)
        if permutation is None:
            permutation = np.random.default_rng([self.seed, number]).permutation(self.num_samples)
            self._drawn.clear()
            self._drawn[number] = permutation
        return permutation


def step_positions(consumed: int, schedule: BatchSchedule, rank: int) -> np.ndarray:
    """Positions in the sample order of data-parallel rank `rank` in one step, int64 [microbatches, micro].

    A microbatch takes the next micro * dp positions, of which rank r gets the r-th slice.
    """
    shape = (schedule.num_microbatches(consumed), schedule.data_parallel, schedule.micro)
    positions = np.arange(consumed, consumed + int(np.prod(shape)), dtype=np.int64)
    return positions.reshape(shape)[:, rank]
