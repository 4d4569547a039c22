"""Packs the variable-length sequences of one global batch into rows and distributes the rows over data-parallel ranks.

Every rank computes the same result from the same lengths, without communication. A row is a tuple of indices into the
lengths; its sequences are placed one after the other.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from megatron_moe.config.packing import PackingConfig

Row = tuple[int, ...]


def pack_rows(
    lengths: Sequence[int], config: PackingConfig, capacity: int, *, ranks: int, unit: int
) -> list[list[Row]]:
    """Returns the rows of every data-parallel rank, in the order of its microbatches. All ranks have the same number of
    rows.

    Each sequence is in exactly one row. Sequences are packed in order (`dp_balanced`) or longest first
    (`default_dynamic_cp`) until a row is full; then rows are split until their number is a multiple of `ranks * unit`.
    Rows are empty only if there are fewer sequences than rows. Rows are distributed in serpentine order by their work
    (`dp_balanced`) or by their longest sequence (`default_dynamic_cp`), so that the ranks have similar work in every
    microbatch.

    Args:
        lengths: number of positions of every sequence, at least 1 and at most `capacity`.
        capacity: number of positions per row.
        unit: number of rows per rank is a multiple of this, such as the microbatch size.
    """
    order = list(range(len(lengths)))
    by_length = config.sequence_packing_scheduler == "default_dynamic_cp"
    if by_length:
        order.sort(key=lambda index: -lengths[index])
    rows = _fill(order, lengths, config, capacity)
    rows = _split(rows, lengths, -(-max(len(rows), 1) // (ranks * unit)) * ranks * unit)
    rows.sort(key=lambda row: (-max((lengths[i] for i in row), default=0) * by_length, -attention_work(row, lengths)))
    return serpentine(rows, ranks)


def attention_work(row: Row, lengths: Sequence[int]) -> int:
    """Sum of the squared lengths of a row's sequences, which is proportional to the FLOPs of causal attention."""
    return sum(lengths[index] ** 2 for index in row)


def serpentine(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Distributes rows over ranks in the order 0, 1, ..., n - 1, n - 1, ..., 1, 0, 0, 1, and so on."""
    dealt: list[list[Row]] = [[] for _ in range(ranks)]
    for start in range(0, len(rows), ranks):
        turn = rows[start : start + ranks]
        for rank, row in enumerate(turn if start // ranks % 2 == 0 else reversed(turn)):
            dealt[rank].append(row)
    return dealt


def round_up(length: int, alignment: int) -> int:
    """`length` rounded up to a multiple of `alignment`."""
    return -(-length // alignment) * alignment


def _fill(order: Sequence[int], lengths: Sequence[int], config: PackingConfig, capacity: int) -> list[Row]:
    """Packs sequences in the given order; a sequence that does not fit into the current row starts the next row."""
    rows: list[list[int]] = []
    used = capacity
    for index in order:
        length = lengths[index]
        assert 0 < length <= capacity, f"sequence {index} has {length} positions, but a row has only {capacity}"
        if used + length > capacity or len(rows[-1]) == config.most_sequences:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += round_up(length, config.pad_packed_seq_alignment)
    return [tuple(row) for row in rows]


def _split(rows: list[Row], lengths: Sequence[int], number: int) -> list[Row]:
    """Splits rows until there are `number` of them: always the row with the most work among those with at least two
    sequences, where its halves have the most similar work. Adds empty rows if no row can be split."""
    # The halves of the row at (3,) are at (3, 0) and (3, 1), so that positions sort as the rows are placed.
    parts: list[tuple[int, tuple[int, ...], Row]] = [
        (-attention_work(row, lengths), (place,), row) for place, row in enumerate(rows)
    ]
    whole = [part for part in parts if len(part[2]) < 2]
    heap = [part for part in parts if len(part[2]) > 1]
    heapify(heap)
    while heap and len(heap) + len(whole) < number:
        _, place, row = heappop(heap)
        ends = list(accumulate(lengths[index] ** 2 for index in row))
        cut = min(range(1, len(row)), key=lambda cut: max(ends[cut - 1], ends[-1] - ends[cut - 1]))
        for half, (work, part) in enumerate([(ends[cut - 1], row[:cut]), (ends[-1] - ends[cut - 1], row[cut:])]):
            if len(part) > 1:
                heappush(heap, (-work, (*place, half), part))
            else:
                whole.append((-work, (*place, half), part))
    split = [row for _, _, row in sorted(heap + whole, key=lambda part: part[1])]
    return split + [()] * (number - len(split))
