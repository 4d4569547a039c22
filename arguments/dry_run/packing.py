"""Expected padding of packed rows (`--use-varlen-dataset`), from a random sample of the lengths of documents."""

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from arguments.dry_run.inputs import prefixes_of
from megatron_moe.config.data import INDEX_HEADER, MOCK_LENGTH_END, DataConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.data.packing import pack_rows, round_up

_SAMPLED = 4096
"""Number of documents that are packed for the estimate: whole steps, or equal shares of one step and of its ranks."""
_LENGTH = struct.Struct("<i")


class _Lengths(NamedTuple):
    """Lengths of the documents of one data set."""

    number: int
    length_of: Callable[[int], int]
    """Maps the index of a document to its number of tokens."""


def packed_rows(plan: RunPlan) -> dict[str, Any] | None:
    """Rows per step, their fraction of padding, and the fraction of padding between the sequences of a row.

    Returns None if rows are not packed or the index files cannot be read."""
    config, seq_length = plan.data.packing, plan.data.seq_length
    if config is None:
        return None
    rng = random.Random(plan.data.seed)
    draw = _sampler(plan.data, rng)
    if draw is None:
        return None
    step, group = plan.batch.global_batch_size, plan.pipeline_schedule(plan.num_microbatches).group
    unit = plan.batch.micro_batch_size * (group if plan.parallel.virtual_stages > 1 else 1)
    parts = min(plan.parallel.dp, max(1, step // _SAMPLED))
    steps = max(1, _SAMPLED // step)
    tokens = between = num_rows = 0
    for _ in range(steps):
        lengths = [min(draw() - 1, seq_length) for _ in range(step // parts)]
        dealt = pack_rows(lengths, config, seq_length, ranks=plan.parallel.dp // parts, unit=unit)
        rows = [row for own in dealt for row in own]
        tokens, num_rows = tokens + sum(lengths), num_rows + len(rows)
        ends = [lengths[index] for row in rows for index in row[:-1]]
        between += sum(round_up(length, config.pad_packed_seq_alignment) - length for length in ends)
    positions = num_rows * seq_length
    return {
        "rows": num_rows * parts / steps,
        "positions": seq_length,
        "padding": 1 - tokens / positions,
        "padding_between_sequences": between / positions,
    }


def _sampler(data: DataConfig, rng: random.Random) -> Callable[[], int] | None:
    """Function that returns the number of tokens of a random document with at least two; None without readable data."""
    if data.mock_data:
        return lambda: rng.randrange(2, MOCK_LENGTH_END)
    words = data.train_data_path or data.data_path
    prefixes = prefixes_of(words)
    try:
        sets = [_lengths(Path(f"{prefix}.idx")) for prefix in prefixes]
    except (OSError, struct.error):
        return None
    weights: Sequence[float] = [each.number for each in sets]
    if len(prefixes) != len(words):
        weights = [float(word) for word in words[::2]]
    taken = [0] * len(sets)
    if not all(any(each.length_of(index) > 1 for index in range(min(each.number, _SAMPLED))) for each in sets):
        return None

    def random_length() -> int:
        # as in a blend, the next document is from the data set that is furthest below its share
        which = max(range(len(sets)), key=lambda index: (sum(taken) + 1) * weights[index] / sum(weights) - taken[index])
        taken[which] += 1
        chosen, length = sets[which], 0
        while length < 2:
            length = chosen.length_of(rng.randrange(chosen.number))
        return length

    return random_length


def _lengths(path: Path) -> _Lengths:
    file = path.open("rb")
    *_, number, _ = INDEX_HEADER.unpack(file.read(INDEX_HEADER.size))

    def length_of(index: int) -> int:
        file.seek(INDEX_HEADER.size + _LENGTH.size * index)
        return int(_LENGTH.unpack(file.read(_LENGTH.size))[0])

    return _Lengths(number, length_of)
