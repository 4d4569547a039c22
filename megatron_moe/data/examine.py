"""Validation of token files: checks every token against the vocabulary and collects statistics of the documents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
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
    """None without documents."""
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
        vocab_size: ids must be in [0, vocab_size).
        eod: end-of-document id to count.

    Raises:
        DataProblem: a file is missing or the index is invalid.
    """
    with IndexedTokens(prefix) as tokens:
        ends = np.concatenate(([0], np.cumsum(tokens.sequence_lengths, dtype=np.int64)))[tokens.document_bounds]
        lengths = np.diff(ends)
        ids = _Ids(ends, vocab_size)
        for start, block in _blocks(tokens):
            ids.add(start, block)
        last = (
            [_last(tokens, document) for document in range(len(lengths)) if lengths[document]]
            if eod is not None
            else []
        )
        return DataReport(
            prefix=str(prefix),
            dtype=tokens.dtype.name,
            num_sequences=len(tokens),
            num_documents=len(lengths),
            num_tokens=tokens.num_tokens,
            lengths=_lengths(lengths) if len(lengths) else None,
            num_empty=int((lengths == 0).sum()),
            smallest_id=ids.smallest,
            largest_id=ids.largest,
            num_distinct=len(ids.distinct),
            num_ended=sum(token == eod for token in last),
            problems=tuple(ids.problems()),
        )


class _Ids:
    """Accumulates statistics of the ids, block by block."""

    def __init__(self, ends: np.ndarray, vocab_size: int | None) -> None:
        self._ends, self._vocab_size = ends, vocab_size
        self.smallest: int | None = None
        self.largest: int | None = None
        self.distinct = np.empty(0, dtype=np.int64)
        self._num_invalid = 0
        self._invalid: list[str] = []

    def add(self, start: int, block: np.ndarray) -> None:
        """Adds the tokens [start, start + len(block)) of the file."""
        self.distinct = np.union1d(self.distinct, block)
        self.smallest, self.largest = int(self.distinct[0]), int(self.distinct[-1])
        if self.smallest >= 0 and (self._vocab_size is None or self.largest < self._vocab_size):
            return
        invalid = block < 0 if self._vocab_size is None else (block < 0) | (block >= self._vocab_size)
        places = np.flatnonzero(invalid)
        self._num_invalid += len(places)
        for place in places[: _MAX_PROBLEMS - len(self._invalid)]:
            self._invalid.append(self._message(start + int(place), int(block[place])))

    def problems(self) -> list[str]:
        left = self._num_invalid - len(self._invalid)
        return [*self._invalid, *([f"and {left} more ids outside the vocabulary"] if left else [])]

    def _message(self, number: int, token: int) -> str:
        document = int(np.searchsorted(self._ends, number, side="right")) - 1
        limit = "0 or more" if self._vocab_size is None else f"0 to {self._vocab_size - 1}"
        return f"document {document}, token {number - int(self._ends[document])}: id {token}, expected {limit}"


def _blocks(tokens: IndexedTokens) -> list[tuple[int, np.ndarray]]:
    """(index of the first token, memory-mapped tokens) of every block of the file."""
    if not tokens.num_tokens:
        return []
    stored = np.memmap(tokens.bin_path, dtype=tokens.dtype, mode="r")
    return [(start, stored[start : start + _BLOCK_TOKENS]) for start in range(0, len(stored), _BLOCK_TOKENS)]


def _last(tokens: IndexedTokens, document: int) -> int:
    """Last token of a non-empty document."""
    bounds = tokens.document_bounds
    for sequence in range(int(bounds[document + 1]) - 1, int(bounds[document]) - 1, -1):
        if length := int(tokens.sequence_lengths[sequence]):
            return int(tokens.get(sequence, length - 1, 1)[0])
    raise DataProblem(f"{tokens.prefix}: document {document} is empty")


def _lengths(lengths: np.ndarray) -> DocumentLengths:
    return DocumentLengths(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), int(lengths.max()))
