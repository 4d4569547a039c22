"""Rectangles of the attention mask between two parts of a sequence, against the mask of every pair of positions."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.ops import PositionSpan
from megatron_moe.kernels.reference.attention_blocks import visible_between
from megatron_moe.parallel.context_parallel import split_positions

SEQ = 24
SPLITS = {
    "zigzag of 2": split_positions("zigzag", SEQ, 2),
    "zigzag of 3": split_positions("zigzag", SEQ, 3),
    "contiguous": split_positions("contiguous", SEQ, 4),
    "uneven": ((range(0, 5), range(9, 16)), (range(3, 12),), (range(2, 4), range(4, 11), range(20, 24)), (range(1),)),
    "far apart": ((range(10, 11), range(20, 21)), (range(8, 11), range(18, 21))),
}


def seen_by(found: list[MaskBlock], num_rows: int, num_keys: int) -> Tensor:
    """Number of rectangles in which a row attends to a key."""
    count = torch.zeros(num_rows, num_keys, dtype=torch.int64)
    for pair in found:
        inside = count[pair.rows, pair.keys]
        ahead = torch.arange(inside.shape[1])[None, :] - torch.arange(inside.shape[0])[:, None]
        seen = torch.ones_like(inside, dtype=torch.bool)
        seen &= (ahead >= -pair.left) if pair.left is not None else seen
        seen &= (ahead <= pair.right) if pair.right is not None else seen
        assert seen.any(), f"{pair} sees nothing"
        assert not seen.all() or pair.is_unmasked, f"{pair} needs no mask"
        inside += seen
    return count


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (2, 4), (-1, 3), (4, -1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_every_visible_pair_is_in_exactly_one_rectangle(
    split: str, causal: bool, window: tuple[int, int] | None
) -> None:
    config = CoreAttentionConfig(softmax_scale=1.0, causal=causal, window=window)
    for query, key in product(SPLITS[split], repeat=2):
        visible = visible_between(PositionSpan(chunks=query), PositionSpan(chunks=key), config, torch.device("cpu"))
        assert torch.equal(seen_by(mask_blocks(query, key, config), *visible.shape), visible.long()), (query, key)


@pytest.mark.parametrize("split", SPLITS)
def test_causal_masks_give_causal_squares_and_unmasked_rectangles(split: str) -> None:
    config = CoreAttentionConfig(softmax_scale=1.0)
    for query, key in product(SPLITS[split], repeat=2):
        assert all(pair.is_unmasked or pair.is_causal_square for pair in mask_blocks(query, key, config)), (query, key)


def test_causal_ring_steps_are_single_rectangles() -> None:
    """A rank's own part is a causal square. Of an earlier rank, the first chunk is visible; a later rank's first chunk
    is visible to the last rows only."""
    config = CoreAttentionConfig(softmax_scale=1.0)
    first, second, third = split_positions("zigzag", SEQ, 3)
    all_8, low_4, high_4 = slice(0, 8), slice(0, 4), slice(4, 8)
    assert mask_blocks(second, second, config) == (MaskBlock(all_8, all_8, right=0),)
    assert mask_blocks(second, first, config) == (MaskBlock(all_8, low_4),)
    assert mask_blocks(second, third, config) == (MaskBlock(high_4, all_8),)


def test_earlier_keys_are_split_where_the_diagonal_begins() -> None:
    chunk, everything_before = (range(8, 12),), (range(0, 12),)
    found = mask_blocks(chunk, everything_before, CoreAttentionConfig(softmax_scale=1.0))
    assert found == (MaskBlock(slice(0, 4), slice(0, 8)), MaskBlock(slice(0, 4), slice(8, 12), right=0))


def test_unordered_chunks_are_not_one_causal_square() -> None:
    swapped = (range(4, 8), range(0, 4))
    assert len(mask_blocks(swapped, swapped, CoreAttentionConfig(softmax_scale=1.0))) == 3
