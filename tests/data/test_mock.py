"""The documents of `--mock-data`."""

import numpy as np

from megatron_moe.data.mock import MockTokens


def test_lengths_are_the_fixed_draw() -> None:
    lengths = MockTokens(vocab_size=100, eod=99).sequence_lengths
    expected = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    np.testing.assert_array_equal(lengths, expected)
    assert lengths.dtype == np.int32


def test_a_document_counts_modulo_the_vocabulary_and_ends() -> None:
    tokens = MockTokens(vocab_size=100, eod=99)
    for number in (0, 5, 77):
        length = int(tokens.sequence_lengths[number])
        expected = [place % 100 for place in range(1, length)] + [99]
        assert tokens.get(number).tolist() == expected
        for offset in (0, 1, length // 2, length - 1):
            assert tokens.get(number, offset).tolist() == expected[offset:]
            assert tokens.get(number, offset, 1).tolist() == expected[offset : offset + 1]
            assert tokens.get(number, offset, 0).tolist() == []
