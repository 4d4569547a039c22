"""Data loaders for this data-parallel rank, the batch size of each step and the order of samples.

Batch size and order depend only on configuration, seed and number of consumed samples, so a loader can start anywhere.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from megatron_moe.config.data import DataConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.training import BatchConfig
from megatron_moe.data.batch import MaskConfig, MicroBatch, Samples, make_microbatch, split_sequence, to_device
from megatron_moe.data.datasets import Datasets
from megatron_moe.parallel.context import ParallelContext


class BatchSchedule:
    """Batch size and number of microbatches of a step as functions of the number of samples consumed before it."""

    def __init__(self, batch: BatchConfig, data_parallel: int) -> None:
        self.micro = batch.micro_batch_size
        self.data_parallel = data_parallel
        self.full = batch.global_batch_size
        self.global_batch = batch.size_at
        """Function: number of consumed samples -> global batch size (sequences) of the next step."""

    def num_microbatches(self, consumed: int) -> int:
        """Number of microbatches per data-parallel rank in the step that begins after `consumed` samples."""
        size, micro_step = self.global_batch(consumed), self.micro * self.data_parallel
        assert size and size % micro_step == 0, (
            f"{size} sequences are no multiple of {self.micro} x {self.data_parallel}"
        )
        return size // micro_step


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Mapping from a position in the training order to a sample index.

    Kind "single": the index equals the position. Kind "cyclic": each pass over the data set has a permutation drawn
    from (seed, pass number). The order does not depend on the parallel layout, the batch size or resumption.
    """

    kind: Literal["single", "cyclic"]
    num_samples: int
    seed: int
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Pass number -> permutation, for the last used pass only. Drawing a large permutation takes longer than a step."""

    @property
    def end(self) -> int | None:
        """Number of positions in the order; None if it is unlimited."""
        return self.num_samples if self.kind == "single" else None

    def fingerprint(self, samples: str) -> str:
        """Fingerprint of this order over samples with fingerprint `samples`. With kind "single", the result does not
        depend on the number of samples, because a longer run continues the same order."""
        return samples if self.kind == "single" else f"{self.kind}-{self.num_samples}-{self.seed}-{samples}"

    def indices(self, consumed: np.ndarray) -> np.ndarray:
        """Sample indices (int64) at the positions `consumed` of the order (int64, any shape)."""
        if self.kind == "single":
            return consumed
        passes, positions = np.divmod(consumed, self.num_samples)
        out = np.empty_like(consumed)
        for number in np.unique(passes):
            here = passes == number
            out[here] = self._permutation(int(number))[positions[here]]
        return out

    def _permutation(self, number: int) -> np.ndarray:
        permutation = self._drawn.get(number)
        if permutation is None:
            permutation = np.random.default_rng([self.seed, number]).permutation(self.num_samples)
            self._drawn.clear()
            self._drawn[number] = permutation
        return permutation


def step_positions(consumed: int, schedule: BatchSchedule, rank: int) -> np.ndarray:
    """Positions in the sample order that data-parallel rank `rank` uses in one step, int64 [number of microbatches, M],
    with micro-batch size M. For each microbatch, rank 0 takes the next M positions, rank 1 the M after them, etc."""
    shape = (schedule.num_microbatches(consumed), schedule.data_parallel, schedule.micro)
    positions = np.arange(consumed, consumed + int(np.prod(shape)), dtype=np.int64)
    return positions.reshape(shape)[:, rank]


class _MicrobatchLoader:
    """Builds this data-parallel rank's microbatches from samples."""

    def __init__(self, samples: Samples, masks: MaskConfig, context: ParallelContext) -> None:
        self.samples = samples
        self._masks = masks
        self._context = context
        self._rank = context.group("dp").rank
        self._loss_dtype = torch.promote_types(torch.float32, context.dtype)

    def _on_host(self, indices: np.ndarray) -> MicroBatch:
        """Builds a microbatch of the samples `indices` [micro] in host memory."""
        return make_microbatch(self.samples, indices, self._masks, self._loss_dtype)

    def _on_device(self, batch: MicroBatch) -> MicroBatch:
        """Copies a microbatch to the device and selects this context-parallel rank's part."""
        return split_sequence(to_device(batch, self._context.device), self._context)


class TrainLoader(_MicrobatchLoader):
    """Builds this rank's training microbatches, step by step.

    The only state is the number of samples consumed by all ranks. `prefetch` builds the next step's batches on a thread
    while the current step runs; it does not change their contents.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        schedule: BatchSchedule,
        masks: MaskConfig,
        context: ParallelContext,
        *,
        tokenizer: str = "",
        contents: Mapping[str, str] | None = None,
        prefetch: bool = False,
    ) -> None:
        """`tokenizer`: fingerprint of the tokenizer. `contents`: data prefix -> size and sampled checksum of its .bin
        file. Both are stored in checkpoints."""
        super().__init__(samples, masks, context)
        self.tokenizer = tokenizer
        self.contents = dict(contents or {})
        self.order = order
        self.schedule = schedule
        self.consumed = 0
        self.last_seconds = 0.0
        """Duration of the last `next_step` call in seconds."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if prefetch else None
        self._prefetched: tuple[int, Future[list[MicroBatch]]] | None = None

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of the next step."""
        return self.schedule.num_microbatches(self.consumed)

    @property
    def exhausted(self) -> bool:
        """True if the next step needs more samples than remain."""
        end = self.order.end
        return end is not None and self.consumed + self.schedule.global_batch(self.consumed) > end

    def next_step(self) -> list[MicroBatch]:
        """Returns this rank's microbatches of the next step, on the device. Raises `DataProblem` if exhausted."""
        begun = time.perf_counter()
        size = self.schedule.global_batch(self.consumed)
        if self.exhausted:
            raise DataProblem(
                f"the step after {self.consumed:,} samples needs {size:,} more, but the training data has "
                f"{self.order.end:,}; add data, shorten the run, or use --dataloader-type cyclic"
            )
        batches = self._take(self.consumed)
        self.consumed += size
        if self._pool is not None and not self.exhausted:
            self._prefetched = (self.consumed, self._pool.submit(self._make, self.consumed))
        parts = [self._on_device(batch) for batch in batches]
        self.last_seconds = time.perf_counter() - begun
        return parts

    def skip_step(self) -> int:
        """Skips the samples of the next step; returns the number of skipped samples over all ranks."""
        size = self.schedule.global_batch(self.consumed)
        self.consumed += size
        return size

    def samples_at(self, consumed: int) -> tuple[tuple[int, ...], ...]:
        """Sample indices of each of this rank's microbatches in the step that begins after `consumed` samples."""
        positions = step_positions(consumed, self.schedule, self._rank)
        return tuple(tuple(map(int, indices)) for indices in self.order.indices(positions))

    def state(self) -> dict[str, Any]:
        """State to checkpoint: number of consumed samples, and properties of data, order and tokenizer."""
        return {
            "consumed_samples": self.consumed,
            "fingerprint": self.order.fingerprint(self.samples.fingerprint),
            "tokenizer": self.tokenizer,
            "end_of_document": self._masks.eod,
            "contents": self.contents,
        }

    def restore(self, consumed: int) -> None:
        """Sets the number of samples consumed before the next step."""
        self.consumed = consumed

    def close(self) -> None:
        """Stops the prefetching thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _take(self, consumed: int) -> list[MicroBatch]:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == consumed:
            return prefetched[1].result()
        return self._make(consumed)

    def _make(self, consumed: int) -> list[MicroBatch]:
        positions = step_positions(consumed, self.schedule, self._rank)
        return [self._on_host(indices) for indices in self.order.indices(positions)]


class EvalLoader(_MicrobatchLoader):
    """Builds this rank's microbatches of one validation or test set.

    Evaluation k uses the k-th group of `eval_iters` global batches; the last sample is followed by the first again. If
    `eval_iters` is None, each evaluation uses all full global batches; a set without any raises `DataProblem`.
    """

    def __init__(
        self,
        samples: Samples,
        batch: BatchConfig,
        masks: MaskConfig,
        context: ParallelContext,
        *,
        eval_iters: int | None,
    ) -> None:
        super().__init__(samples, masks, context)
        self.full = eval_iters is None
        sizes = batch.evaluation
        self.eval_iters = len(samples) // sizes.global_batch_size if eval_iters is None else eval_iters
        if self.full and not self.eval_iters:
            raise DataProblem(
                f"--full-validation: the validation set has {len(samples):,} samples, less than one global batch of "
                f"{sizes.global_batch_size}; add data or use a smaller --eval-global-batch-size"
            )
        self._schedule = BatchSchedule(sizes, context.group("dp").size)

    def batches(self, evaluation: int = 0) -> Iterator[MicroBatch]:
        """Yields this rank's microbatches of evaluation number `evaluation`, counted from 0."""
        size, number = self._schedule.full, 0 if self.full else evaluation
        for step in range(number * self.eval_iters, (number + 1) * self.eval_iters):
            for positions in step_positions(step * size, self._schedule, self._rank):
                yield self._on_device(self._on_host(np.remainder(positions, len(self.samples))))


def train_loader(datasets: Datasets, config: DataConfig, batch: BatchConfig, context: ParallelContext) -> TrainLoader:
    """Builds the loader of a run's training samples."""
    assert datasets.train is not None, "a run with --skip-train has no training loader"
    order = SampleOrder(kind=config.dataloader_type, num_samples=len(datasets.train), seed=config.seed)
    schedule = BatchSchedule(batch, context.group("dp").size)
    return TrainLoader(
        datasets.train,
        order,
        schedule,
        datasets.masks,
        context,
        tokenizer=datasets.tokenizer,
        contents=datasets.contents,
        prefetch=config.num_workers > 0,
    )
