"""Random token sequences for the comparison of layouts."""

import numpy as np
import pytest

from megatron_moe.layout_check.samples import RandomSamples


@pytest.mark.parametrize("packed", [False, True])
def test_documents_of_eight_sequences_start_with_different_tokens(packed: bool) -> None:
    """Equal first tokens of documents would have exactly equal router probabilities."""
    samples = RandomSamples(num_samples=64, seq_length=32, vocab_size=96, packed=packed)
    for group in np.split(np.arange(64), 8):
        rows = np.stack([samples.tokens(index)[:-1] for index in group])
        starts = np.zeros(rows.shape, dtype=bool)
        starts[:, 0] = True
        if packed:
            starts[:, 1:] |= rows[:, :-1] == 95
        found = rows[starts]
        assert len(found) == len(set(found.tolist())), sorted(found.tolist())
        assert len(found) > 8 or not packed
