"""What a pair of token files holds: every token against the vocabulary, and the lengths of its documents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.indexed import IndexedTokens

_BLOCK_TOKENS = 1 << 24
_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class DocumentLengths:
    """Of documents, in tokens."""

    shortest: int
    median: float
    mean: float
    longest: int


@dataclass(frozen=True)
class DataReport:
    """What an examination found."""

    prefix: str
    dtype: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    lengths: DocumentLengths | None
    """None when there is no document."""
    num_empty: int
    """Documents without a token."""
    smallest_id: int | None
    largest_id: int | None
    num_distinct: int
    num_ended: int
    """Documents whose last token is the one asked for."""
    problems: tuple[str, ...]


def examine(prefix: Path, *, vocab_size: int | None = None, eod: int | None = None) -> DataReport:
    """Reads every token of `<prefix>.bin`; the index is checked as it is opened.

    Args:
        vocab_size: ids from 0 to below it are in order.
        eod: counts the documents that end with this id.
    Raises:
        DataProblem: a file is missing, or the index is not exactly what the format says.
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
    """Gathers what is known of the ids, block by block."""

    def __init__(self, ends: np.ndarray, vocab_size: int | None) -> None:
        self._ends, self._vocab_size = ends, vocab_size
        self.smallest: int | None = None
        self.largest: int | None = None
        self.distinct = np.empty(0, dtype=np.int64)
        self._num_strange = 0
        self._strange: list[str] = []

    def add(self, start: int, block: np.ndarray) -> None:
        """Tokens from number `start` on."""
        self.distinct = np.union1d(self.distinct, block)
        self.smallest, self.largest = int(self.distinct[0]), int(self.distinct[-1])
        if self.smallest >= 0 and (self._vocab_size is None or self.largest < self._vocab_size):
            return
        strange = block < 0 if self._vocab_size is None else (block < 0) | (block >= self._vocab_size)
        places = np.flatnonzero(strange)
        self._num_strange += len(places)
        for place in places[: _MAX_PROBLEMS - len(self._strange)]:
            self._strange.append(self._told(start + int(place), int(block[place])))

    def problems(self) -> list[str]:
        left = self._num_strange - len(self._strange)
        return [*self._strange, *([f"and {left} more ids outside the vocabulary"] if left else [])]

    def _told(self, number: int, token: int) -> str:
        document = int(np.searchsorted(self._ends, number, side="right")) - 1
        limit = "0 or more" if self._vocab_size is None else f"0 to {self._vocab_size - 1}"
        return f"document {document}, token {number - int(self._ends[document])}: id {token}, expected {limit}"


def _blocks(tokens: IndexedTokens) -> list[tuple[int, np.ndarray]]:
    """(number of the first token, tokens) of all of the file. Memory-mapped: nothing is read yet."""
    if not tokens.num_tokens:
        return []
    stored = np.memmap(tokens.bin_path, dtype=tokens.dtype, mode="r")
    return [(start, stored[start : start + _BLOCK_TOKENS]) for start in range(0, len(stored), _BLOCK_TOKENS)]


def _last(tokens: IndexedTokens, document: int) -> int:
    """The last token of a document that has one."""
    bounds = tokens.document_bounds
    for sequence in range(int(bounds[document + 1]) - 1, int(bounds[document]) - 1, -1):
        if length := int(tokens.sequence_lengths[sequence]):
            return int(tokens.get(sequence, length - 1, 1)[0])
    raise DataProblem(f"{tokens.prefix}: document {document} is empty")


def _lengths(lengths: np.ndarray) -> DocumentLengths:
    return DocumentLengths(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), int(lengths.max()))
