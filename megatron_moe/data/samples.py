"""Fixed-length samples cut from a shuffled stream of documents, in Megatron's order.

Three index arrays say which tokens sample i has:

    document_index [epochs * documents]  the documents in the order they are laid end to end
    sample_index   [n + 1, 2]            where every sample starts: place in document_index, token within the document
    shuffle_index  [n]                   which of these samples is the i-th

A sample has seq_length + 1 tokens, inputs and labels overlapping; the next one starts at its last token. All draws
come from one numpy RandomState, in a fixed order, so the arrays depend on nothing but documents, seed and length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.cache import digest_of, load_or_build

_SEPARATE_BELOW = 0.80
"""Share of an epoch's samples below which the last, incomplete epoch is shuffled by itself."""
PADDING = -1
"""What fills the end of a sample that the documents do not: no vocabulary has this id."""


class Documents(Protocol):
    """Where tokens come from: `indexed.IndexedTokens` or `mock.MockTokens`."""

    sequence_lengths: np.ndarray

    def __len__(self) -> int: ...
    @property
    def identity(self) -> dict[str, str | int]: ...
    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Which samples are wanted of one set of documents."""

    documents: range
    """The split's sequences."""
    split: str
    seq_length: int
    num_samples: int | None
    """At least so many, over as many epochs as that takes; None: one epoch."""
    seed: int
    drop_last_partial: bool = True
    """Leave out the tokens after the last full sample."""


class DocumentSamples:
    """The samples of one split of one data set.

    Raises `DataProblem` when the split holds too few tokens for one sample.
    """

    def __init__(self, source: Documents, name: str, request: SampleRequest, cache_dir: Path | None) -> None:
        self.source = source
        self.name = name
        self.seq_length = request.seq_length
        span = request.documents
        passes = plan_passes(source, name, request)
        # Not the number of samples: a longer run over the same passes has the same order.
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
        """Sample `index` as int64 [seq_length + 1], filled up with `PADDING`. Raises `DataProblem` for negative ids."""
        out = np.full(self.seq_length + 1, PADDING, dtype=np.int64)
        place = 0
        for document, offset, length in self._pieces(index):
            piece = self.source.get(document, offset, length)
            out[place : place + len(piece)] = piece
            place += len(piece)
        if place and out[:place].min() < 0:  # would train as padding
            position = int(out[:place].argmin())
            raise DataProblem(
                f"token id {out[position]} in {self.locate(index, position)} (sample {index}, position {position}) is "
                f"negative; check the file with tools/check_data.py and make it again with tools/preprocess_data.py"
            )
        return out

    def locate(self, index: int, position: int) -> str:
        """Names the file, document and place that token `position` of sample `index` comes from."""
        for document, offset, length in self._pieces(index):
            if position < length:
                return f"{self.name}, document {document}, token {offset + position}"
            position -= length
        raise AssertionError(f"sample {index} has no token at {position} past its end")

    def _pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """(document, offset, length) of every stretch of tokens in sample `index`."""
        row = int(self.shuffle_index[index])
        (first, start), (last, end) = self.sample_index[row].tolist(), self.sample_index[row + 1].tolist()
        for place in range(first, last + 1):
            document = int(self.document_index[place])
            offset = start if place == first else 0
            # The last stretch includes the token that the next sample starts with.
            stop = end + 1 if place == last else int(self.source.sequence_lengths[document])
            yield document, offset, stop - offset


@dataclass(frozen=True)
class Passes:
    """How often the documents are gone through."""

    epochs: int
    separate_final: bool
    """The last epoch is shuffled by itself."""
    samples_before_final: int
    """That the epochs before the last give."""


def plan_passes(source: Documents, name: str, request: SampleRequest) -> Passes:
    """The epochs that give the samples of `request`.

    The last one is shuffled by itself when fewer than 80 % of its samples are wanted: shuffled together, some documents
    would be seen once more than others. Raises `DataProblem` when the documents do not give a sample.
    """
    span = request.documents
    tokens = int(source.sequence_lengths[span.start : span.stop].sum(dtype=np.int64))
    incomplete = tokens <= request.seq_length and request.num_samples is None and request.drop_last_partial
    if tokens < 2 or incomplete:
        raise DataProblem(
            f"the {request.split} split of {name} has {tokens:,} tokens in {len(span):,} documents, too few "
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
    """The three arrays of `request`."""
    documents = np.arange(request.documents.start, request.documents.stop, dtype=np.int32)
    rng = np.random.RandomState(request.seed)
    document_index = _shuffled_documents(documents, passes, rng)
    sample_index = build_sample_index(
        np.asarray(source.sequence_lengths),
        document_index,
        request.seq_length,
        drop_last_partial=request.drop_last_partial,
    )
    count = len(sample_index) - 1
    shuffle_index = _shuffled_range(passes.samples_before_final if passes.separate_final else count, count, rng)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """The fewest passes over the documents that give `num_samples` samples; one when None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, *, drop_last_partial: bool
) -> np.ndarray:
    """[n + 1, 2]: where sample k starts, that is at token k * seq_length of the documents laid end to end.

    int32 when both columns fit, else int64.
    """
    ordered = lengths[document_index]
    ends = np.cumsum(ordered, dtype=np.int64)
    num_tokens = int(ends[-1])
    full, rest = divmod(num_tokens - 1, seq_length)
    count = full + (1 if rest and not drop_last_partial else 0)
    starts = np.arange(count + 1, dtype=np.int64) * seq_length
    starts[-1] = min(starts[-1], num_tokens - 1)
    # The first document that ends after the token; empty documents end where they start and are passed over.
    place = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends - ordered)[place]
    if count > full:
        # The end of an incomplete sample is the last document, even when that one is empty.
        place[-1], offset[-1] = len(document_index) - 1, ordered[-1] - 1
    place[0], offset[0] = 0, 0
    largest = max(len(document_index), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([place, offset], axis=1).astype(dtype)


def _shuffled_documents(documents: np.ndarray, passes: Passes, rng: np.random.RandomState) -> np.ndarray:
    if passes.separate_final:
        parts = [np.tile(documents, passes.epochs - 1), documents.copy()]
    else:
        parts = [np.tile(documents, passes.epochs)]
    for part in parts:
        rng.shuffle(part)
    return np.concatenate(parts)


def _shuffled_range(first: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """0 … total - 1, the first `first` and the others shuffled among themselves."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = [np.arange(first, dtype=dtype)]
    if first != total:
        parts.append(np.arange(first, total, dtype=dtype))
    for part in parts:
        rng.shuffle(part)
    return np.concatenate(parts)
