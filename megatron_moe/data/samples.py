"""Fixed-length samples cut from shuffled documents, and blends of several data sets, in Megatron's order.

Three index arrays define the tokens of sample i:

    document_index [epochs * documents]  documents in the order in which they are concatenated
    sample_index   [n + 1, 2]            start of every sample: index into document_index, token offset in document
    shuffle_index  [n]                   permutation of the samples: sample i has row shuffle_index[i] of sample_index

A sample has seq_length + 1 tokens, from which inputs and labels are taken. Its last token is the first token of the
next sample. All random numbers come from one numpy RandomState with the seed of the request, in a fixed order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.text import counted
from megatron_moe.data.cache import digest_of, load_or_build

_SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if less than this fraction of its samples is used."""
PADDING = -1
"""Value at the positions after the end of an incomplete sample. It is not a valid token id."""


class Documents(Protocol):
    """Interface of a source of tokens; `IndexedTokens` and `MockTokens` implement it."""

    sequence_lengths: np.ndarray

    def __len__(self) -> int: ...
    @property
    def identity(self) -> dict[str, str | int]: ...
    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Parameters of the samples to build for one split of one data set."""

    documents: range
    """Indices of the split's documents."""
    split: str
    seq_length: int
    num_samples: int | None
    """Minimum number of samples. If one epoch has fewer, documents are repeated in further epochs. None means one
    epoch."""
    seed: int
    drop_last_partial: bool = True
    """Drops the tokens after the last full sample; otherwise they form a padded sample."""


class DocumentSamples:
    """Samples of one split of one data set.

    Raises `DataProblem` if the split has too few tokens for one sample.
    """

    def __init__(self, source: Documents, name: str, request: SampleRequest, cache_dir: Path | None) -> None:
        self.source = source
        self.name = name
        self.seq_length = request.seq_length
        span = request.documents
        passes = plan_passes(source, name, request)
        # The number of samples is excluded, because a longer run over the same epochs has the same order.
        self.inputs = {
            "class": "GPTDataset",
            "dataset": name,
            "data": source.identity,
            "documents": [span.start, span.stop],
            "index_split": request.split,
            "epochs": passes.epochs,
            "separate_final_epoch": passes.separate_final,
            "sequence_length": request.seq_length,
            "random_seed": request.seed,
            "drop_last_partial": request.drop_last_partial,
        }
        arrays = load_or_build(
            cache_dir, f"GPTDataset-{request.split}", self.inputs, lambda: build_indices(source, request, passes)
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    @property
    def fingerprint(self) -> str:
        return digest_of(self.inputs)

    def tokens(self, index: int) -> np.ndarray:
        """Sample `index`, int64 [seq_length + 1], padded with `PADDING`. Raises `DataProblem` for negative ids."""
        out = np.full(self.seq_length + 1, PADDING, dtype=np.int64)
        place = 0
        for document, offset, length in self._spans(index):
            tokens = self.source.get(document, offset, length)
            out[place : place + len(tokens)] = tokens
            place += len(tokens)
        if place and out[:place].min() < 0:  # negative ids would be treated as padding
            position = int(out[:place].argmin())
            raise DataProblem(
                f"token id {out[position]} in {self.locate(index, position)} (sample {index}, position {position}) is "
                f"negative; check the file with tools/check_data.py and rebuild it with tools/preprocess_data.py"
            )
        return out

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of positions of the samples `indices`, int64: always `seq_length`."""
        return np.full(len(indices), self.seq_length, dtype=np.int64)

    def locate(self, index: int, position: int) -> str:
        """File, document and offset of token `position` of sample `index`, as text for messages."""
        left = position
        for document, offset, length in self._spans(index):
            if left < length:
                return f"{self.name}, document {document}, token {offset + left}"
            left -= length
        raise AssertionError(f"sample {index} has no token at position {position}; it has {position - left} tokens")

    def _spans(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yields (document, token offset, length) of the document spans that form sample `index`, in order."""
        row = int(self.shuffle_index[index])
        (first, start), (last, end) = self.sample_index[row].tolist(), self.sample_index[row + 1].tolist()
        for place in range(first, last + 1):
            document = int(self.document_index[place])
            offset = start if place == first else 0
            # The last span includes the first token of the next sample.
            stop = end + 1 if place == last else int(self.source.sequence_lengths[document])
            yield document, offset, stop - offset


@dataclass(frozen=True)
class Passes:
    """Number of epochs over the documents, and whether the last epoch is shuffled separately."""

    epochs: int
    separate_final: bool
    """True if the last epoch is shuffled separately from the others, so that all its samples come last."""
    samples_before_final: int
    """Number of samples in the epochs before the last."""


def plan_passes(source: Documents, name: str, request: SampleRequest) -> Passes:
    """Computes the epochs that the samples of `request` need.

    The last epoch is shuffled separately if less than 80 % of its samples are used. If all epochs were shuffled
    together, the unused samples would come from every epoch. Raises `DataProblem` if there are too few tokens.
    """
    span = request.documents
    tokens = int(source.sequence_lengths[span.start : span.stop].sum(dtype=np.int64))
    incomplete = tokens <= request.seq_length and request.num_samples is None and request.drop_last_partial
    if tokens < 2 or incomplete:
        raise DataProblem(
            f"the {request.split} split of {name} has {tokens:,} tokens in {counted(len(span), 'document')}, too few "
            f"for one sample of {request.seq_length:,} + 1; use more data, another --split or a shorter --seq-length"
        )
    epochs = num_epochs(tokens, request.seq_length, request.num_samples)
    if epochs == 1 or request.num_samples is None:
        return Passes(1, separate_final=False, samples_before_final=0)
    before_final = ((epochs - 1) * tokens - 1) // request.seq_length
    from_final = request.num_samples - before_final
    in_one_epoch = (tokens - 1) // request.seq_length
    assert 0 <= from_final <= in_one_epoch + 1, f"{from_final=} {in_one_epoch=}"
    return Passes(epochs, from_final < int(_SEPARATE_BELOW * in_one_epoch), before_final)


def build_indices(source: Documents, request: SampleRequest, passes: Passes) -> dict[str, np.ndarray]:
    """Builds document_index, sample_index and shuffle_index (see the module docstring)."""
    span = request.documents
    dtype = np.int32 if span.stop <= np.iinfo(np.int32).max else np.int64
    documents = np.arange(span.start, span.stop, dtype=dtype)
    rng = np.random.RandomState(request.seed)
    last = [documents] if passes.separate_final else []
    document_index = _shuffled([np.tile(documents, passes.epochs - len(last)), *last], rng)
    sample_index = build_sample_index(
        np.asarray(source.sequence_lengths),
        document_index,
        request.seq_length,
        drop_last_partial=request.drop_last_partial,
    )
    count = len(sample_index) - 1
    order = np.arange(count, dtype=np.int64 if count >= np.iinfo(np.uint32).max - 1 else np.uint32)
    first = passes.samples_before_final if passes.separate_final else count
    shuffle_index = _shuffled([order[:first], order[first:]], rng)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Smallest number of epochs with enough tokens for `num_samples` samples; 1 if `num_samples` is None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, *, drop_last_partial: bool
) -> np.ndarray:
    """Start of every sample and end of the last, [n + 1, 2]: index into `document_index`, token offset in document.

    Sample k starts at token k * seq_length of the concatenated documents. int32 if all values fit, else int64.
    """
    ordered = lengths[document_index]
    ends = np.cumsum(ordered, dtype=np.int64)
    num_tokens = int(ends[-1])
    full, rest = divmod(num_tokens - 1, seq_length)
    count = full + (1 if rest and not drop_last_partial else 0)
    starts = np.arange(count + 1, dtype=np.int64) * seq_length
    starts[-1] = min(starts[-1], num_tokens - 1)
    # The first document that ends after the token; empty documents are skipped.
    place = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends - ordered)[place]
    if count > full:
        # An incomplete sample ends in the last document, even if that document is empty.
        place[-1], offset[-1] = len(document_index) - 1, ordered[-1] - 1
    place[0], offset[0] = 0, 0
    largest = max(len(document_index), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([place, offset], axis=1).astype(dtype)


def _shuffled(parts: Sequence[np.ndarray], rng: np.random.RandomState) -> np.ndarray:
    """Shuffles each array in place and concatenates them."""
    for part in parts:
        rng.shuffle(part)
    return np.concatenate(parts)


def normalize(weights: Sequence[float]) -> list[float]:
    """Divides weights by their sum, with numpy so that the result is bitwise equal to Megatron's."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def blend_order(
    weights: Sequence[float] | np.ndarray, size: int, limits: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Order of a blend: each sample's data set index, int16 [size], and its index within that data set, int64 [size].

    Each sample is taken from the data set whose number of samples so far is furthest below its weighted share; the
    first such data set wins ties. `limits`: maximum number of samples from each data set.
    """
    shares = np.asarray(weights, dtype=np.float64)
    used = np.zeros(len(shares), dtype=np.float64)
    deficit = np.empty_like(used)
    dataset = np.zeros(size, dtype=np.int16)
    for sample in range(size):
        np.multiply(shares, max(sample, 1), out=deficit)
        deficit -= used
        if limits is not None:
            deficit[used == limits] = -np.inf
        chosen = deficit.argmax()
        dataset[sample] = chosen
        used[chosen] += 1
    return {"dataset_index": dataset, "dataset_sample_index": _running_counts(dataset, len(shares))}


def _running_counts(dataset: np.ndarray, num_datasets: int) -> np.ndarray:
    """For each entry of `dataset`, the number of earlier entries with the same value, int64."""
    counts = np.empty(len(dataset), dtype=np.int64)
    for chosen in range(num_datasets):
        places = np.flatnonzero(dataset == chosen)
        counts[places] = np.arange(len(places))
    return counts


class Samples(Protocol):
    """Interface for reading samples by index, such as those of one data set or of a blend."""

    def __len__(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def tokens(self, index: int) -> np.ndarray: ...
    def lengths(self, indices: np.ndarray) -> np.ndarray: ...
    def locate(self, index: int, position: int) -> str: ...


class SamplesOfOneDataset(Samples, Protocol):
    """Interface of the samples of one data set, from which blends are composed; `DocumentSamples` and `WholeDocuments`
    implement it."""

    name: str
    inputs: dict[str, Any]
    """Values that determine the order of the samples, as JSON values."""


class BlendedSamples:
    """Interleaved samples of several data sets.

    If `weights` are given, `size` is required, and the blend has `size` samples. If `weights` is None, data sets are
    weighted by their numbers of samples, and the blend has all samples, or the first `size` if given.
    """

    def __init__(
        self,
        parts: Sequence[SamplesOfOneDataset],
        weights: Sequence[float] | None,
        size: int | None,
        cache_dir: Path | None,
    ) -> None:
        self.parts = tuple(parts)
        self._lengths = [len(part) for part in parts]
        if weights is None:
            total = sum(self._lengths)
            self._weights = None
            self._size = total if size is None else min(size, total)
        else:
            assert size is not None, "a weighted blend requires a size"
            self._weights = normalize(weights)
            self._size = size
        self.inputs = {
            "class": "BlendedDataset",
            "datasets": [part.inputs for part in parts],
            "weights": self._weights,
            "size": self._size,
        }
        arrays = load_or_build(
            cache_dir, f"BlendedDataset-{self.parts[0].inputs['index_split']}", self.inputs, self._build_order
        )
        self._dataset = arrays["dataset_index"]
        self._sample = arrays["dataset_sample_index"]
        for part, count in zip(self.parts, np.bincount(self._dataset, minlength=len(self.parts)), strict=True):
            if count > len(part):
                raise DataProblem(
                    f"the blend takes {count:,} samples of {part.name}, which has {len(part):,}; the number per data "
                    f"set is rounded up: take more samples (--train-iters, --eval-iters) or blend fewer data sets"
                )

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def fingerprint(self) -> str:
        # The size does not matter: a shorter blend is a prefix of a longer one.
        return digest_of({"datasets": [part.fingerprint for part in self.parts], "weights": self._weights})

    def tokens(self, index: int) -> np.ndarray:
        """Token ids of sample `index`, int64 [seq_length + 1], padded with `PADDING`."""
        return self.parts[self._dataset[index]].tokens(int(self._sample[index]))

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of positions of the samples `indices`, int64."""
        datasets, out = self._dataset[indices], np.empty(len(indices), dtype=np.int64)
        for number in np.unique(datasets):
            here = datasets == number
            out[here] = self.parts[number].lengths(self._sample[indices[here]])
        return out

    def locate(self, index: int, position: int) -> str:
        """File, document and offset of token `position` of sample `index`, as text for messages."""
        return self.parts[self._dataset[index]].locate(int(self._sample[index]), position)

    def _build_order(self) -> dict[str, np.ndarray]:
        if self._weights is not None:
            return blend_order(self._weights, self._size)
        lengths = np.array(self._lengths)
        return blend_order(lengths / lengths.sum(dtype=np.float64), self._size, limits=lengths)
