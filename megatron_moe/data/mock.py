"""`--mock-data`: documents made of counting, of random lengths, that need no file."""

import numpy as np

_LENGTH_END = 4096
_SEED = 0


class MockTokens:
    """Documents 1, 2, 3, … (modulo the vocabulary), end of document; lengths uniform in [1, 4096).

    The lengths are those of Megatron's mock data, or its first `num_documents`: the same for every run.
    """

    def __init__(self, *, vocab_size: int, eod: int, num_documents: int) -> None:
        self._vocab_size = vocab_size
        self._eod = eod
        rng = np.random.default_rng(seed=_SEED)
        self.sequence_lengths = rng.integers(low=1, high=_LENGTH_END, size=num_documents, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def identity(self) -> dict[str, str | int]:
        return {"mock": len(self), "vocab_size": self._vocab_size, "eod": self._eod}

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """int64 tokens [offset, offset + length) of a document, to its end when `length` is None."""
        total = int(self.sequence_lengths[sequence])
        stop = total if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == total and stop > offset:
            tokens[-1] = self._eod
        return tokens
