"""The documents of `--mock-data`."""

import numpy as np

from megatron_moe.data.mock import MockTokens


def test_lengths_are_the_fixed_draw() -> None:
    lengths = MockTokens(vocab_size=100, eod=99, num_documents=100_000).sequence_lengths
    expected = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    np.testing.assert_array_equal(lengths, expected)
    assert lengths.dtype == np.int32
    few = MockTokens(vocab_size=100, eod=99, num_documents=300)
    np.testing.assert_array_equal(few.sequence_lengths, expected[:300])
    assert len(few) == 300 and few.identity["mock"] == 300


def test_a_document_counts_modulo_the_vocabulary_and_ends() -> None:
    tokens = MockTokens(vocab_size=100, eod=99, num_documents=100)
    for number in (0, 5, 77):
        length = int(tokens.sequence_lengths[number])
        expected = [place % 100 for place in range(1, length)] + [99]
        assert tokens.get(number).tolist() == expected
        for offset in (0, 1, length // 2, length - 1):
            assert tokens.get(number, offset).tolist() == expected[offset:]
            assert tokens.get(number, offset, 1).tolist() == expected[offset : offset + 1]
            assert tokens.get(number, offset, 0).tolist() == []
