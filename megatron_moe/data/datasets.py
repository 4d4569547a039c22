"""Training, validation and test samples of a run, built from `DataConfig`; parses `--data-path` and `--split`."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from megatron_moe.config.data import MOCK_LENGTH_END, DataConfig
from megatron_moe.config.exit_codes import DataProblem, MemoryProblem, RunError
from megatron_moe.config.text import counted
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.data.batch import MaskConfig
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.samples import BlendedSamples, Documents, DocumentSamples, SampleRequest, Samples, normalize
from megatron_moe.data.tokenizer import Tokenizer
from megatron_moe.data.varlen import WholeDocuments
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

SPLITS = ("train", "valid", "test")
_MOST_DATASETS = 32766
Share = tuple[float, float]
_MOST_SAMPLES = 2**48
"""Maximum number of samples per split, so that array sizes in bytes fit into 64 bits."""
_ROUND_SECONDS = 30.0
"""Interval of the collectives that run while ranks wait for rank 0; well below the timeout of a collective."""


@dataclass(frozen=True, kw_only=True)
class Blend:
    """File prefixes and weights of data sets. If `weights` is None, each data set's number of samples is its weight."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def is_single(self) -> bool:
        return len(self.prefixes) == 1 and self.weights is None


def parse_blend(words: Sequence[str]) -> Blend | None:
    """Parses the values of `--data-path`: one or more prefixes, or alternating weights and prefixes.

    Words are parsed as (weight, prefix) pairs if their number is even and the first word of each pair is a number.
    Returns None if `words` is empty. Raises `DataProblem` for weights that are not positive and for too many data sets.
    """
    if not words:
        return None
    weights = [_number(word) for word in words[::2]]
    is_weighted = len(words) % 2 == 0 and None not in weights
    number = len(weights) if is_weighted else len(words)
    if number > _MOST_DATASETS:
        raise DataProblem(f"--data-path blends {number:,} data sets; at most {_MOST_DATASETS:,} are possible")
    if not is_weighted:
        return Blend(prefixes=tuple(words))
    given = tuple(weight for weight in weights if weight is not None)
    for weight, prefix in zip(given, words[1::2], strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataProblem(f"--data-path gives {prefix} the weight {weight:g}; a weight must be larger than 0")
    return Blend(prefixes=tuple(words[1::2]), weights=given)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[tuple[float, float] | None, ...]:
    """Parses `--split` ("969, 30, 1"). Returns each split's (begin, end) fractions of documents, None if empty."""
    numbers = [_number(number) or 0.0 for number in re.findall(r"[.0-9]+", text)]
    if len(numbers) > len(SPLITS) or not sum(numbers) > 0:
        raise DataProblem(
            f'--split "{text}" must be up to three shares (train, valid, test) of which one is larger than 0, '
            f'such as "969, 30, 1"'
        )
    shares = normalize(numbers + [0.0] * (len(SPLITS) - len(numbers)))
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    return tuple(None if end <= begin else (begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True))


def split_range(share: tuple[float, float], num_documents: int) -> range:
    """Range of document indices for a (begin, end) fraction from `parse_split`."""
    begin, end = (int(round(edge * float(num_documents))) for edge in share)
    return range(begin, end)


def samples_per_dataset(weights: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Number of samples to build from each data set for a blend of `size` samples. `surplus`: fraction to add."""
    return [int(math.ceil(math.ceil(size * weight) * (1 + surplus))) for weight in weights]


class MockTokens:
    """Synthetic documents (`--mock-data`): token ids 1, 2, 3, … modulo the vocabulary size, then end-of-document.

    The lengths are drawn uniformly from [1, 4096) and equal those of Megatron's first `num_documents` mock documents.
    """

    def __init__(self, *, vocab_size: int, eod: int, num_documents: int) -> None:
        self._vocab_size = vocab_size
        self._eod = eod
        rng = np.random.default_rng(seed=0)
        self.sequence_lengths = rng.integers(low=1, high=MOCK_LENGTH_END, size=num_documents, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def identity(self) -> dict[str, str | int]:
        return {"mock": len(self), "vocab_size": self._vocab_size, "eod": self._eod}

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Returns the tokens [offset, offset + length) of a document, int64; up to its end if `length` is None."""
        total = int(self.sequence_lengths[sequence])
        stop = total if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == total and stop > offset:
            tokens[-1] = self._eod
        return tokens


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Samples of all splits of a run, with mask settings for microbatches and data fingerprints for checkpoints."""

    train: Samples | None
    """Training samples; None with `--skip-train`."""
    valid: Mapping[str, Samples]
    """Validation sets by name; empty without validation data."""
    test: Samples | None
    masks: MaskConfig
    notes: tuple[str, ...]
    """Log lines about sizes and empty splits."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer (`Tokenizer.fingerprint`)."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Data prefix -> size and sampled checksum of its .bin file. Filled only on global rank 0."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the order of the training samples and of the sizes of their files; "none" if the run has no
        training samples. Token ids are covered by `contents`."""
        return "none" if self.train is None else self.train.fingerprint


@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """Number of samples that a run needs from each split."""

    train: int
    valid: int
    test: int


def split_sizes(batch: BatchConfig, loop: LoopConfig, progress: tuple[int, int] = (0, 0)) -> SplitSizes:
    """Number of samples that a run needs. Training: `train_samples`, or `train_iters` global batches, or 0 with
    `skip_train`; more if the batches before `progress` (iteration, consumed samples) were larger. Validation:
    `eval_iters` global batches every `eval_interval` iterations and at the end. Test: `eval_iters` global batches."""
    evaluations = 1 + (loop.train_iters // loop.eval_interval if loop.eval_interval else 0)
    iteration, consumed = progress
    train = loop.train_samples
    if train is None:
        size = batch.global_batch_size
        train = max(loop.train_iters * size, consumed + (loop.train_iters - iteration) * size)
    one_evaluation = loop.eval_iters * batch.evaluation.global_batch_size
    return SplitSizes(train=0 if loop.skip_train else train, valid=evaluations * one_evaluation, test=one_evaluation)


def build_datasets(
    config: DataConfig,
    batch: BatchConfig,
    loop: LoopConfig,
    tokenizer: Tokenizer,
    context: ParallelContext,
    progress: tuple[int, int] = (0, 0),
) -> Datasets:
    """Builds the samples of every split. All ranks must call it. `progress`: see `split_sizes`.

    Rank 0 builds the index arrays first; then the other ranks load them from the cache. An error on rank 0 is raised on
    all ranks.

    Raises:
        DataProblem: files or blends are invalid.
        MemoryProblem: the index arrays do not fit into host memory.
    """
    sizes = split_sizes(batch, loop, progress)
    too_many = MemoryProblem(
        f"host memory cannot hold the shuffled sample index ({sizes.train:,} training, {sizes.valid:,} validation and "
        f"{sizes.test:,} test samples); lower --train-iters or --train-samples, lower --eval-iters, or raise "
        "--eval-interval"
    )
    if max(sizes.train, sizes.valid, sizes.test) > _MOST_SAMPLES:
        raise too_many

    def build_and_close() -> Datasets:
        try:
            builder = _Builder(config, sizes, tokenizer)
            datasets = builder.build()
            return replace(datasets, contents=builder.contents()) if context.is_first else datasets
        except MemoryError as error:
            raise too_many from error

    return build_and_close() if context.group("world").size == 1 else _first_rank_first(build_and_close, context)


def _first_rank_first(build: Callable[[], Datasets], context: ParallelContext) -> Datasets:
    """Calls `build` on rank 0, then on the other ranks. While rank 0 builds, all ranks run a short collective every 30
    s, because computing the order of a large blend may take longer than the timeout of one collective."""
    done = False
    problem: RunError | None = None
    with ThreadPool(1) as pool:  # a daemon thread, which does not delay process exit
        first = pool.apply_async(build) if context.is_first else None
        while not done:
            if first is not None:
                first.wait(_ROUND_SECONDS)
                done = first.ready()
                try:
                    if done:
                        first.get()
                except RunError as error:
                    problem = error
            # collective over world: one short object, no backward
            done, problem = gather_objects((done, problem), context.group("world"))[0]
    if problem is not None:
        raise problem
    return build() if first is None else first.get()


class _Builder:
    """Opens the data files and builds the samples of all splits."""

    def __init__(self, config: DataConfig, sizes: SplitSizes, tokenizer: Tokenizer) -> None:
        self.config = config
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.notes: list[str] = []
        self.opened: dict[str, Documents] = {}

    def build(self) -> Datasets:
        train, valid, test = self._splits()
        named = [("train", train), *valid.items(), ("test", test)]
        parts = [f"{name} {len(samples):,}" for name, samples in named if samples is not None]
        kind = "documents of up to" if self.config.packing is not None else "samples of"
        self.notes.append(f"{kind} {self.config.seq_length:,} tokens: {', '.join(parts)}")
        masks = MaskConfig(
            vocab_size=self.config.vocab_size,
            eod=self.tokenizer.eod,
            pad=self.tokenizer.pad,
            eod_mask_loss=self.config.eod_mask_loss,
            reset_position_ids=self.config.reset_position_ids,
            reset_attention_mask=self.config.reset_attention_mask,
        )
        notes, tokenizer = tuple(self.notes), self.tokenizer.fingerprint
        return Datasets(train=train, valid=valid, test=test, masks=masks, notes=notes, tokenizer=tokenizer)

    def contents(self) -> dict[str, str]:
        """Data prefix -> size and sampled checksum of its .bin file, for all opened files."""
        files = self.opened.items()
        return {prefix: tokens.sample_content() for prefix, tokens in files if isinstance(tokens, IndexedTokens)}

    def _splits(self) -> tuple[Samples | None, dict[str, Samples], Samples | None]:
        own = {name: parse_blend(getattr(self.config, f"{name}_data_path")) for name in SPLITS}
        if self.config.mock_data or not any(own.values()):
            shared = Blend(prefixes=("mock",)) if self.config.mock_data else parse_blend(self.config.data_path)
            if shared is None:
                raise DataProblem("there is no training data: give --data-path, --train-data-path or --mock-data")
            shares = dict(zip(SPLITS, parse_split(self.config.split), strict=True))
            blends: dict[str, Blend | None] = dict.fromkeys(SPLITS, shared)
        else:
            shares = dict.fromkeys(SPLITS, (0.0, 1.0))
            blends = own
        return (
            self._samples("train", blends["train"], shares["train"], self.sizes.train),
            self._validation(blends["valid"], shares["valid"]),
            self._samples("test", blends["test"], shares["test"], self.sizes.test),
        )

    def _validation(self, blend: Blend | None, share: Share | None) -> dict[str, Samples]:
        """Validation sets by name: one set, or one per prefix with `--multiple-validation-sets`."""
        if blend is None or not self.sizes.valid:
            return {}
        if not self.config.multiple_validation_sets:
            named = {"validation": blend}
        elif blend.weights is not None:
            raise DataProblem(
                "--multiple-validation-sets evaluates every data set separately, without weights: list only prefixes "
                "in --valid-data-path or --data-path"
            )
        else:
            short = {prefix: Path(prefix).name for prefix in blend.prefixes}
            count = Counter(short.values())
            named = {name if count[name] == 1 else prefix: Blend(prefixes=(prefix,)) for prefix, name in short.items()}
        size = None if self.config.full_validation else self.sizes.valid
        built = {name: self._samples("valid", part, share, size) for name, part in named.items()}
        return {name: samples for name, samples in built.items() if samples is not None}

    def _samples(self, split: str, blend: Blend | None, share: Share | None, size: int | None) -> Samples | None:
        """Samples of one split; None if the split is not needed or has no documents. For training, a split
        without documents raises `DataProblem`. `size`: minimum number of samples; None means one pass over the data."""
        if blend is None or share is None or size == 0:
            if split == "train" and size:
                raise DataProblem("the train split is empty: give --train-data-path, or --split a first number above 0")
            return None
        empty = [prefix for prefix in blend.prefixes if len(split_range(share, len(self._open(prefix)))) == 0]
        if empty and (split == "train" or len(empty) < len(blend.prefixes)):
            raise DataProblem(
                f"the {split} split of {empty[0]} has none of its {counted(len(self._open(empty[0])), 'document')}; "
                f'use more data or another --split than "{self.config.split}"'
            )
        if empty:
            documents = sum(len(self._open(prefix)) for prefix in blend.prefixes)
            self.notes.append(
                f'no {split} data: --split "{self.config.split}" gives it none of {counted(documents, "document")}'
            )
            return None
        return self._single(split, blend, share, size) if blend.is_single else self._blended(split, blend, share, size)

    def _single(self, split: str, blend: Blend, share: Share, size: int | None) -> DocumentSamples | WholeDocuments:
        prefix = blend.prefixes[0]
        request = SampleRequest(
            documents=split_range(share, len(self._open(prefix))),
            split=split,
            seq_length=self.config.seq_length,
            num_samples=size,
            seed=self.config.seed,
            drop_last_partial=split != "valid" or self.config.drop_last_partial_validation,
        )
        if self.config.packing is not None:
            return WholeDocuments(self._open(prefix), prefix, request, self.tokenizer.eod, self._cache_dir(prefix))
        return DocumentSamples(self._open(prefix), prefix, request, self._cache_dir(prefix))

    def _blended(self, split: str, blend: Blend, share: Share, size: int | None) -> BlendedSamples:
        built: Sequence[int | None] = [None] * len(blend.prefixes)
        weights = None
        total = size
        if blend.weights is not None:
            assert size is not None, "a weighted blend requires a size"
            weights = normalize(blend.weights)
            built = samples_per_dataset(weights, size, self.config.mid_level_dataset_surplus)
            total = sum(samples_per_dataset(weights, size))
        parts = [
            self._single(split, Blend(prefixes=(prefix,)), share, count)
            for prefix, count in zip(blend.prefixes, built, strict=True)
        ]
        # The order is cached, because computing it takes minutes for some hundred million samples.
        return BlendedSamples(parts, weights, total, self._cache_dir(blend.prefixes[0]))

    def _open(self, prefix: str) -> Documents:
        if prefix not in self.opened:
            self.opened[prefix] = (
                MockTokens(
                    vocab_size=self.config.vocab_size, eod=self.tokenizer.eod, num_documents=self.config.mock_documents
                )
                if self.config.mock_data
                else IndexedTokens(prefix, mmap=self.config.mmap_bin_files)
            )
        return self.opened[prefix]

    def _cache_dir(self, prefix: str) -> Path | None:
        if self.config.mock_data:
            return None
        return self.config.data_cache_path or Path(prefix) / "cache" / "GPTDataset_indices"
