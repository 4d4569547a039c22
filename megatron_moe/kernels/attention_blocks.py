"""Attention mask between two parts of a sequence, as rectangles of query rows and keys with one diagonal band each.

A part consists of chunks of consecutive positions. The mask between a query chunk and a key chunk is a band around the
diagonal, which two numbers describe. Fully masked rectangles are omitted and unmasked ones need no mask; the host
detects both cases without a device synchronisation. Document boundaries are on the device and are applied by the
kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_moe.config.attention import CoreAttentionConfig

Chunks = tuple[range, ...]
"""Ranges of consecutive sequence positions; rows of q, k and v are stored in the order of the ranges."""


@dataclass(frozen=True)
class MaskBlock:
    """Rectangle of query rows and keys with a diagonal mask band. Row i and key i are counted within the rectangle."""

    rows: slice
    keys: slice
    left: int | None = None
    """Query row i attends to no key before key i - left; None means no limit on the left. `left` may be negative."""
    right: int | None = None
    """Query row i attends to no key after key i + right; None means no limit on the right. `right` may be negative."""

    @property
    def is_unmasked(self) -> bool:
        """Whether the rectangle is unmasked: every row attends to every key."""
        return self.left is None and self.right is None

    @property
    def is_causal_square(self) -> bool:
        """Whether the rectangle is square with a plain causal mask: row i attends to the keys up to i."""
        return self.left is None and self.right == 0 and _length(self.rows) == _length(self.keys)


def mask_blocks(query: Chunks, key: Chunks, config: CoreAttentionConfig) -> tuple[MaskBlock, ...]:
    """Splits the visible part of the mask into disjoint rectangles. Fully masked rectangles are omitted.

    Under a causal mask without window, each rectangle is either unmasked or a causal square, which every attention
    library supports.
    """
    left, right = attention_reach(config)
    everything = MaskBlock(slice(0, _total(query)), slice(0, _total(key)))
    if left is None and right is None:
        return (everything,)
    if left is None and right == 0:
        if query == key and _ascending(query) and _total(query) > 1:
            # rows are sorted by position, so a causal mask hides every key after the row
            return (replace(everything, right=0),)
        query, key = _cut_at_ends(query, key), _cut_at_ends(key, query)
    found = [
        pair
        for first_row, queries in chunks_with_first_row(query)
        for first_key, keys in chunks_with_first_row(key)
        if (pair := _between(first_row, queries, first_key, keys, left, right)) is not None
    ]
    return tuple(_joined(found))


def attention_reach(config: CoreAttentionConfig) -> tuple[int | None, int | None]:
    """Number of positions to the left and to the right to which a query attends; None means no limit."""
    left, right = (None if side < 0 else side for side in config.window or (-1, -1))
    return left, 0 if config.causal else right


def _between(
    first_row: int, queries: range, first_key: int, keys: range, left: int | None, right: int | None
) -> MaskBlock | None:
    """Part of the mask between a query chunk and a key chunk, which start at the given row and key; None if it is fully
    masked."""
    shift = queries.start - keys.start
    farthest_ahead, farthest_back = keys[-1] - queries[0], queries[-1] - keys[0]
    nearest_ahead, nearest_back = -farthest_back, -farthest_ahead
    if right is not None and nearest_ahead > right or left is not None and nearest_back > left:
        return None
    return MaskBlock(
        slice(first_row, first_row + len(queries)),
        slice(first_key, first_key + len(keys)),
        None if left is None or farthest_back <= left else left - shift,
        None if right is None or farthest_ahead <= right else right + shift,
    )


def _cut_at_ends(chunks: Chunks, others: Chunks) -> Chunks:
    """Splits chunks at the bounds of `others`, so that each result is inside one chunk of `others` or overlaps none."""
    ends = sorted({end for other in others for end in (other.start, other.stop)})
    cut = []
    for chunk in chunks:
        inside = [chunk.start, *(end for end in ends if chunk.start < end < chunk.stop), chunk.stop]
        cut += [range(*both) for both in pairwise(inside)]
    return tuple(cut)


def _joined(found: Sequence[MaskBlock]) -> list[MaskBlock]:
    """Merges adjacent unmasked rectangles, first along the keys and then along the rows."""
    wide: list[MaskBlock] = []
    for pair in found:
        last = wide[-1] if wide else None
        if last and _all_see_all(last, pair) and last.rows == pair.rows and last.keys.stop == pair.keys.start:
            wide[-1] = replace(last, keys=slice(last.keys.start, pair.keys.stop))
        else:
            wide.append(pair)
    tall: list[MaskBlock] = []
    for pair in wide:
        above = [
            at
            for at, one in enumerate(tall)
            if _all_see_all(one, pair) and one.keys == pair.keys and one.rows.stop == pair.rows.start
        ]
        if above:
            tall[above[0]] = replace(tall[above[0]], rows=slice(tall[above[0]].rows.start, pair.rows.stop))
        else:
            tall.append(pair)
    return tall


def _all_see_all(*mask_blocks: MaskBlock) -> bool:
    return all(pair.is_unmasked for pair in mask_blocks)


def chunks_with_first_row(chunks: Chunks) -> Iterator[tuple[int, range]]:
    """Yields (index of the chunk's first row, chunk) for every chunk."""
    row = 0
    for chunk in chunks:
        yield row, chunk
        row += len(chunk)


def _ascending(chunks: Chunks) -> bool:
    return all(one.stop <= other.start for one, other in pairwise(chunks))


def _total(chunks: Chunks) -> int:
    return sum(map(len, chunks))


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
