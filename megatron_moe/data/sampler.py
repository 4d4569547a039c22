"""Batch size schedule and sample order, as pure functions of the seed and the number of consumed samples."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.training import BatchConfig


class BatchSchedule:
    """Global batch size by consumed samples, with `--rampup-batch-size START INCREMENT SAMPLES`.

    The batch size grows from START in steps of INCREMENT, evenly spaced in consumed samples, to its full size after
    SAMPLES. Raises `EnvironmentProblem` if a size is not a multiple of micro batch size x data-parallel size.
    """

    def __init__(self, batch: BatchConfig, data_parallel: int) -> None:
        self.micro = batch.micro_batch_size
        self.data_parallel = data_parallel
        self.full = batch.global_batch_size
        self.start, self.increment, self.ramp_samples = batch.rampup_batch_size or (batch.global_batch_size, 1, 0)
        self._batch = batch
        self._check_ramp()
        for size in self.sizes:
            self._check_divides(size)

    @property
    def sizes(self) -> range:
        """Every global batch size that occurs."""
        return range(self.start, self.full + 1, self.increment)

    @property
    def samples_per_microstep(self) -> int:
        """Number of sequences in one microbatch over all data-parallel ranks."""
        return self.micro * self.data_parallel

    def global_batch(self, consumed: int) -> int:
        """Number of sequences, over all ranks, in the step that begins after `consumed` samples."""
        return self._batch.size_at(consumed)

    def num_microbatches(self, consumed: int) -> int:
        """Number of microbatches per rank in the step that begins after `consumed` samples."""
        return self.global_batch(consumed) // self.samples_per_microstep

    def _check_ramp(self) -> None:
        if self.start < 1 or self.increment < 1 or self.ramp_samples < 0 or self.start > self.full:
            raise EnvironmentProblem(
                f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples} must start between 1 and the "
                f"global batch size {self.full} and grow by at least 1"
            )
        if (self.full - self.start) % self.increment:
            raise EnvironmentProblem(
                f"--rampup-batch-size cannot go from {self.start} to the global batch size {self.full} in steps of "
                f"{self.increment}: the distance {self.full - self.start} is not a multiple of it"
            )

    def _check_divides(self, size: int) -> None:
        if size % self.samples_per_microstep or size < 1:
            raise EnvironmentProblem(
                f"global batch size {size} is not a multiple of {self.samples_per_microstep} = micro batch size "
                f"{self.micro} x data-parallel size {self.data_parallel}; change --global-batch-size, "
                f"--micro-batch-size or the number of ranks"
            )


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Mapping from a position in the training order to the index of a sample.

    "single" is the identity; "cyclic" permutes every pass over the data set with a generator seeded by (seed, pass).
    Both are independent of the layout, the batch size and resumption.
    """

    kind: Literal["single", "cyclic"]
    num_samples: int
    seed: int
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached permutation of the last pass; for a large data set, drawing it takes longer than a step."""

    @property
    def end(self) -> int | None:
        """Number of positions, or None if unlimited."""
        return self.num_samples if self.kind == "single" else None

    def fingerprint(self, samples: str) -> str:
        """Fingerprint of the order and of a data set with fingerprint `samples`. For "single" it does not contain the
        number of samples, because a longer run continues the same order."""
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
    """Positions in the sample order that data-parallel rank `rank` uses in one step, int64 [microbatches, micro].

    A microbatch uses the next micro * dp positions; rank r gets the r-th slice of `micro` positions.
    """
    shape = (schedule.num_microbatches(consumed), schedule.data_parallel, schedule.micro)
    positions = np.arange(consumed, consumed + int(np.prod(shape)), dtype=np.int64)
    return positions.reshape(shape)[:, rank]
