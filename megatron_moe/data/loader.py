"""Data loaders for this data-parallel rank, the batch size of each step and the order of samples.

Batch size and order depend only on configuration, seed and number of consumed samples, so a loader can start anywhere.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from megatron_moe.config.data import DataConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.text import counted
from megatron_moe.config.training import BatchConfig, StepCounts
from megatron_moe.data.batch import (
    MaskConfig,
    MicroBatch,
    make_microbatch,
    make_packed_microbatch,
    split_sequence,
    to_device,
)
from megatron_moe.data.datasets import Datasets
from megatron_moe.data.packing import Row, pack_rows
from megatron_moe.data.samples import Samples
from megatron_moe.parallel.context import ParallelContext


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


def rank_share(step: np.ndarray, rank: int, *, ranks: int, micro: int) -> np.ndarray:
    """Samples that data-parallel rank `rank` of `ranks` takes from those of a step, [number of microbatches, micro].
    For each microbatch, rank 0 takes the next `micro` samples, rank 1 the `micro` after them, etc."""
    assert len(step) and len(step) % (micro * ranks) == 0, (
        f"{len(step)} sequences are not a multiple of {micro} x {ranks}"
    )
    return step.reshape(-1, ranks, micro)[:, rank]


@dataclass(frozen=True, kw_only=True)
class RowPacker:
    """Packs the samples of a step into rows; the number of microbatches varies from step to step."""

    config: PackingConfig
    seq_length: int
    """Number of positions per row."""
    ranks: int
    """Number of data-parallel ranks to which the rows are distributed. If a loader has fewer ranks, each of them
    processes the microbatches of several of these ranks, one after the other."""
    group: int = 1
    """The number of microbatches per step and rank is a multiple of this number, which is the microbatch group size of
    interleaved schedules."""

    def microbatches(self, samples: Samples, step: np.ndarray, micro: int) -> list[list[tuple[Row, ...]]]:
        """Microbatches of every rank, each `micro` rows of sample indices, for a step over the samples `step`."""
        lengths = samples.lengths(step).tolist()
        dealt = pack_rows(lengths, self.config, self.seq_length, ranks=self.ranks, unit=micro * self.group)
        named = [[tuple(int(step[place]) for place in row) for row in rows] for rows in dealt]
        return [[tuple(rows[start : start + micro]) for start in range(0, len(rows), micro)] for rows in named]

    def describe(self, samples: Samples, batch: BatchConfig) -> str:
        """Text with the rows, microbatches and share of padding of the first global batch of `samples`."""
        step = np.arange(min(batch.global_batch_size, len(samples)), dtype=np.int64)
        own = self.microbatches(samples, step, batch.micro_batch_size)[0]
        num_tokens, num_rows = int(samples.lengths(step).sum()), len(own) * batch.micro_batch_size * self.ranks
        padding = 1 - num_tokens / (num_rows * self.seq_length)
        return (
            f"packing: {counted(len(step), 'document')} with {num_tokens:,} tokens fill {num_rows:,} rows, of which "
            f"{padding:.1%} are padding; {len(own):,} microbatches per rank"
        )


class _MicrobatchLoader:
    """Builds this data-parallel rank's microbatches from samples."""

    def __init__(
        self, samples: Samples, masks: MaskConfig, context: ParallelContext, micro: int, packer: RowPacker | None
    ) -> None:
        """`packer`: packs samples into rows; None if every sample fills a row."""
        self.samples = samples
        self._masks = masks
        self._context = context
        self._dp = context.group("dp")
        self._micro = micro
        self._packer = packer
        self._loss_dtype = torch.promote_types(torch.float32, context.dtype)

    def _microbatches(self, step: np.ndarray) -> list[tuple[Row, ...]]:
        """Rows of sample indices of each of this rank's microbatches, for a step over the samples `step`."""
        rank, ranks = self._dp.rank, self._dp.size
        if self._packer is not None:
            dealt = self._packer.microbatches(self.samples, step, self._micro)
            return list(chain(*zip(*dealt[rank::ranks], strict=True)))
        share = rank_share(step, rank, ranks=ranks, micro=self._micro).tolist()
        return [tuple((index,) for index in indices) for indices in share]

    def _on_host(self, rows: Sequence[Row]) -> MicroBatch:
        """Builds a microbatch in host memory whose rows hold the given samples."""
        if self._packer is None:
            return make_microbatch(self.samples, np.array(rows)[:, 0], self._masks, self._loss_dtype)
        config, seq_length = self._packer.config, self._packer.seq_length
        return make_packed_microbatch(self.samples, rows, config, seq_length, self._masks, self._loss_dtype)

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
        batch: BatchConfig,
        masks: MaskConfig,
        context: ParallelContext,
        *,
        tokenizer: str = "",
        contents: Mapping[str, str] | None = None,
        prefetch: bool = False,
        packer: RowPacker | None = None,
    ) -> None:
        """`tokenizer`: fingerprint of the tokenizer. `contents`: data prefix -> size and sampled checksum of its .bin
        file. Both are stored in checkpoints."""
        super().__init__(samples, masks, context, batch.micro_batch_size, packer)
        self.tokenizer = tokenizer
        self.contents = dict(contents or {})
        self.order = order
        self.batch = batch
        self.consumed = 0
        self.last_seconds = 0.0
        """Duration of the last `next_step` call in seconds."""
        self.last_counts: StepCounts | None = None
        """Size of the step that `next_step` returned last; None before its first call."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if prefetch else None
        self._prefetched: tuple[int, Future[list[MicroBatch]]] | None = None

    @property
    def exhausted(self) -> bool:
        """True if the next step needs more samples than remain."""
        end = self.order.end
        return end is not None and self.consumed + self.batch.size_at(self.consumed) > end

    def next_step(self) -> list[MicroBatch]:
        """Returns this rank's microbatches of the next step, on the device. Raises `DataProblem` if exhausted."""
        begun = time.perf_counter()
        size = self.batch.size_at(self.consumed)
        if self.exhausted:
            raise DataProblem(
                f"the step after {self.consumed:,} samples needs {size:,} more, but the training data has "
                f"{self.order.end:,}; add data, shorten the run, or use --dataloader-type cyclic"
            )
        batches = self._take(self.consumed)
        self.last_counts = StepCounts(size, int(self.samples.lengths(self._step(self.consumed)).sum()))
        self.consumed += size
        if self._pool is not None and not self.exhausted:
            self._prefetched = (self.consumed, self._pool.submit(self._make, self.consumed))
        parts = [self._on_device(batch) for batch in batches]
        self.last_seconds = time.perf_counter() - begun
        return parts

    def require_steps(self, number: int) -> None:
        """Raises `DataProblem` if the data ends before the next `number` steps."""
        end = self.order.end
        possible = number if end is None else self.batch.steps_for(end, self.consumed)
        if possible < number:
            raise DataProblem(
                f"the training data has {end:,} samples, {self.consumed:,} of them consumed, which is enough for "
                f"{counted(possible, 'iteration')}, but {number:,} are left; add data, shorten the run, give weights "
                f"in --data-path, with which data sets are repeated, or use --dataloader-type cyclic"
            )

    def skip_step(self) -> int:
        """Skips the samples of the next step; returns the number of skipped samples over all ranks."""
        size = self.batch.size_at(self.consumed)
        self.consumed += size
        return size

    def samples_at(self, consumed: int) -> tuple[tuple[int, ...], ...]:
        """Sample indices of each of this rank's microbatches in the step that begins after `consumed` samples."""
        return tuple(tuple(chain(*rows)) for rows in self._microbatches(self._step(consumed)))

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
        return [self._on_host(rows) for rows in self._microbatches(self._step(consumed))]

    def _step(self, consumed: int) -> np.ndarray:
        """Indices of the samples of the step that begins after `consumed` samples, over all ranks, int64."""
        size = self.batch.size_at(consumed)
        return self.order.indices(np.arange(consumed, consumed + size, dtype=np.int64))


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
        packer: RowPacker | None = None,
    ) -> None:
        sizes = batch.evaluation
        super().__init__(samples, masks, context, sizes.micro_batch_size, packer)
        self.full = eval_iters is None
        self.eval_iters = len(samples) // sizes.global_batch_size if eval_iters is None else eval_iters
        if self.full and not self.eval_iters:
            raise DataProblem(
                f"--full-validation: the validation set has {len(samples):,} samples, less than one global batch of "
                f"{sizes.global_batch_size}; add data or use a smaller --eval-global-batch-size"
            )
        self._size = sizes.global_batch_size

    def steps(self, evaluation: int = 0) -> Iterator[list[MicroBatch]]:
        """Yields this rank's microbatches of every global batch of evaluation number `evaluation`, counted from 0."""
        number = 0 if self.full else evaluation
        for step in range(number * self.eval_iters, (number + 1) * self.eval_iters):
            positions = np.arange(step * self._size, (step + 1) * self._size, dtype=np.int64)
            rows = self._microbatches(positions % len(self.samples))
            yield [self._on_device(self._on_host(each)) for each in rows]


def train_loader(
    datasets: Datasets,
    config: DataConfig,
    batch: BatchConfig,
    context: ParallelContext,
    packer: RowPacker | None = None,
) -> TrainLoader:
    """Builds the loader of a run's training samples. `packer`: packs documents into rows; None if samples are not
    packed."""
    assert datasets.train is not None, "a run with --skip-train has no training loader"
    order = SampleOrder(kind=config.dataloader_type, num_samples=len(datasets.train), seed=config.seed)
    return TrainLoader(
        datasets.train,
        order,
        batch,
        datasets.masks,
        context,
        tokenizer=datasets.tokenizer,
        contents=datasets.contents,
        prefetch=config.num_workers > 0,
        packer=packer,
    )
