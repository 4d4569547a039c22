"""Blends of data sets: parsing of `--data-path` and `--split`, and the order in which a blend draws samples."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.cache import digest_of, load_or_build
from megatron_moe.data.samples import DocumentSamples

SPLITS = ("train", "valid", "test")
_MOST_DATASETS = 32767


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Prefixes and weights of data sets. `weights` None: weights are proportional to the sizes of the data sets."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def is_single(self) -> bool:
        return len(self.prefixes) == 1 and self.weights is None


def parse_blend(words: Sequence[str]) -> Blend | None:
    """Parses one prefix, (weight, prefix) pairs or a list of prefixes; None for no words.

    An even number of words is parsed as pairs if every other word is a number. Raises `DataProblem` for weights that
    are not positive.
    """
    if not words:
        return None
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        return Blend(prefixes=tuple(words))
    given = tuple(weight for weight in weights if weight is not None)
    for weight, prefix in zip(given, words[1::2], strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataProblem(f"--data-path gives {prefix} the weight {weight:g}; a weight must be larger than 0")
    if len(given) >= _MOST_DATASETS:
        raise DataProblem(f"--data-path blends {len(given):,} data sets; at most {_MOST_DATASETS - 1:,} are possible")
    return Blend(prefixes=tuple(words[1::2]), weights=given)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalize(weights: Sequence[float]) -> list[float]:
    """Divides weights by their sum; uses numpy for bitwise equality with Megatron."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def parse_split(text: str) -> tuple[tuple[float, float] | None, ...]:
    """Parses `"969, 30, 1"` to (begin, end) fractions of documents for train, valid and test; None if empty."""
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
    """Indices of the documents in a (begin, end) fraction of all documents."""
    begin, end = (int(round(edge * float(num_documents))) for edge in share)
    return range(begin, end)


def samples_per_dataset(weights: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Number of samples of each data set in a blend of `size`, plus the fraction `surplus`; `weights` sum to 1."""
    return [int(math.ceil(math.ceil(size * weight) * (1 + surplus))) for weight in weights]


def blend_order(
    weights: Sequence[float] | np.ndarray, size: int, limits: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Data set (int16 [size]) of every sample of a blend, and index within the data set (int64 [size]).

    Greedy: draws from the data set with the largest deficit relative to its weight; the first data set wins ties.
    `limits`: maximum number of samples to draw from each data set.
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
    """Number of earlier entries with the same data set, for every entry, int64 [len(dataset)]."""
    counts = np.empty(len(dataset), dtype=np.int64)
    for chosen in range(num_datasets):
        places = np.flatnonzero(dataset == chosen)
        counts[places] = np.arange(len(places))
    return counts


class BlendedSamples:
    """Interleaved samples of several `DocumentSamples`.

    `size` is required if `weights` are set. `weights` None: weights are proportional to the lengths of the data sets;
    `size` then limits the number of samples.
    """

    def __init__(
        self,
        parts: Sequence[DocumentSamples],
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
            assert size is not None, "a blend by weights needs a size"
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
        # The size is not included: a shorter blend is a prefix of a longer blend.
        return digest_of({"datasets": [part.fingerprint for part in self.parts], "weights": self._weights})

    def tokens(self, index: int) -> np.ndarray:
        """Sample `index` as int64 [seq_length + 1], padded with `PADDING`."""
        return self.parts[self._dataset[index]].tokens(int(self._sample[index]))

    def locate(self, index: int, position: int) -> str:
        """File, document and offset of token `position` of sample `index`, as text for messages."""
        return self.parts[self._dataset[index]].locate(int(self._sample[index]), position)

    def _build_order(self) -> dict[str, np.ndarray]:
        if self._weights is not None:
            return blend_order(self._weights, self._size)
        lengths = np.array(self._lengths)
        return blend_order(lengths / lengths.sum(dtype=np.float64), self._size, limits=lengths)
