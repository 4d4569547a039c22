"""Validation of token files: checks every token against the vocabulary and collects statistics of the documents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_moe.data.indexed import IndexedTokens

_BLOCK_TOKENS = 1 << 24
_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class DocumentLengths:
    """Statistics of document lengths, in tokens."""

    shortest: int
    median: float
    mean: float
    longest: int


@dataclass(frozen=True)
class DataReport:
    """Statistics and problems of a pair of token files."""

    prefix: str
    dtype: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    lengths: DocumentLengths | None
    """None if there are no documents."""
    num_empty: int
    """Number of documents without tokens."""
    smallest_id: int | None
    largest_id: int | None
    num_distinct: int
    num_ended: int
    """Number of documents that end with the end-of-document id."""
    problems: tuple[str, ...]


def examine(prefix: Path, *, vocab_size: int | None = None, eod: int | None = None) -> DataReport:
    """Reads every token of `<prefix>.bin`; opening the files validates the index.

    Args:
        vocab_size: ids outside [0, vocab_size) are reported as problems.
        eod: end-of-document id to count.

    Raises:
        DataProblem: a file is missing or the index is invalid.
    """
    with IndexedTokens(prefix) as tokens:
        ends = np.concatenate(([0], np.cumsum(tokens.sequence_lengths, dtype=np.int64)))[tokens.document_bounds]
        lengths = np.diff(ends)
        distinct, problems = _check_ids(tokens, ends, vocab_size)
        num_ended = 0 if eod is None else sum(_last(tokens, document) == eod for document in np.flatnonzero(lengths))
        spread = None
        if len(lengths):
            median, mean = float(np.median(lengths)), float(lengths.mean())
            spread = DocumentLengths(int(lengths.min()), median, mean, int(lengths.max()))
        return DataReport(
            prefix=str(prefix),
            dtype=tokens.dtype.name,
            num_sequences=len(tokens),
            num_documents=len(lengths),
            num_tokens=tokens.num_tokens,
            lengths=spread,
            num_empty=int((lengths == 0).sum()),
            smallest_id=int(distinct[0]) if len(distinct) else None,
            largest_id=int(distinct[-1]) if len(distinct) else None,
            num_distinct=len(distinct),
            num_ended=num_ended,
            problems=tuple(problems),
        )


def _check_ids(tokens: IndexedTokens, ends: np.ndarray, vocab_size: int | None) -> tuple[np.ndarray, list[str]]:
    """Returns the sorted distinct ids of a file, and messages about invalid ids. `ends`: token offsets of documents."""
    distinct = np.empty(0, dtype=np.int64)
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    expected = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
    problems: list[str] = []
    num_invalid = 0
    stored = np.memmap(tokens.bin_path, dtype=tokens.dtype, mode="r") if tokens.num_tokens else distinct
    for start in range(0, len(stored), _BLOCK_TOKENS):
        block = stored[start : start + _BLOCK_TOKENS]
        distinct = np.union1d(distinct, block)
        if distinct[0] >= 0 and distinct[-1] < limit:
            continue
        places = np.flatnonzero((block < 0) | (block >= limit))
        num_invalid += len(places)
        for place in places[: _MAX_PROBLEMS - len(problems)]:
            document = int(np.searchsorted(ends, start + place, side="right")) - 1
            token = start + int(place) - int(ends[document])
            problems.append(f"document {document}, token {token}: id {block[place]}, expected {expected}")
    if num_invalid > len(problems):
        problems.append(f"and {num_invalid - len(problems)} more ids outside the vocabulary")
    return distinct, problems


def _last(tokens: IndexedTokens, document: int) -> int:
    """Last token of a non-empty document."""
    first, end = tokens.document_bounds[document : document + 2]
    sequence = int(first + np.flatnonzero(tokens.sequence_lengths[first:end])[-1])
    return int(tokens.get(sequence)[-1])
