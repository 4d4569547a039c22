"""Reduce-scatter inside a host by copies: each rank copies its contributions to the memory of the shards' owners.

Copies between GPUs run on copy engines, so only the sum of the contributions, which is a short kernel of the caller,
occupies SMs. Every rank has a receive buffer with one slot per other rank. Shards that are larger than a slot are
reduced in several rounds. In a round, a rank

1. takes the flag `read` of each other rank, which has read its slots of the round before, copies to the slot of this
   rank there, and then sets the flag `arrived` of this rank there;
2. takes its own flags `arrived` of all ranks, and sums the contributions;
3. sets the flag `read` of this rank on all other ranks.

To take a flag means to wait for it and to reset it, so that all rounds are the same and a CUDA graph can replay them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.shared_shards import ALIGN, aligned_bytes
from megatron_moe.parallel.stream_flags import FLAG_BYTES, make_stream_flags
from megatron_moe.parallel.symmetric_memory import allocate_symmetric


class Contributions(NamedTuple):
    """Contributions of all ranks to a part of this rank's shard of one flat tensor."""

    flat: int
    """Index of the flat tensor."""
    start: int
    """Index of the part's first element in the shard."""
    own: Tensor
    """Contribution of this rank [N]."""
    received_PN: Tensor
    """Contributions of the other ranks in rank order; the distance between two rows is that between two slots."""


class Round(NamedTuple):
    """Part of a reduction for which the receive buffers are used once."""

    copies: tuple[tuple[int, tuple[tuple[Tensor, Tensor], ...]], ...]
    """(rank, pairs of destination and source) of every other rank."""
    received: tuple[Contributions, ...]


class PeerReduce:
    """Receive buffers and flags of the ranks of a group."""

    def __init__(self, slot_bytes: int, group: ProcessGroup, context: ParallelContext) -> None:
        """Allocates slots of `slot_bytes`, a multiple of `ALIGN`. Collective over the group."""
        assert slot_bytes % ALIGN == 0, f"{slot_bytes} bytes per slot"
        self._group = group
        self._slot_bytes = slot_bytes
        num_bytes = (group.size - 1) * slot_bytes + 2 * group.size * FLAG_BYTES
        memory = allocate_symmetric(
            num_bytes, group, context, purpose="reduce gradients", alternative="--fsdp-reduce-backend nccl"
        )
        self.memory = memory[group.rank]
        """Symmetric memory of this rank: slots and flags."""
        self._slots = [part[: (group.size - 1) * slot_bytes].view(group.size - 1, slot_bytes) for part in memory]
        flags = [part[(group.size - 1) * slot_bytes :].view(torch.int32).view(2, group.size, -1) for part in memory]
        self._arrived, self._read = ([list(each[kind, :, :1]) for each in flags] for kind in range(2))
        self._others = [(group.rank + step) % group.size for step in range(1, group.size)]
        """The other ranks; each rank starts with its successor, so that the ranks do not all copy to the same one."""
        for flag in self._read[group.rank]:
            flag.fill_(1)  # the slots of the other ranks are free
        self._flags = make_stream_flags(group, context, "gradients")

    def plan_rounds(self, flats: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> tuple[Round, ...]:
        """Divides the reduction of flat tensors of one dtype into rounds. `sizes`: per tensor, sizes of the shards of
        all ranks. The rounds can be repeated while the tensors exist."""
        rank, dtype = self._group.rank, flats[0].dtype
        shards = [flat.split(list(each)) for flat, each in zip(flats, sizes, strict=True)]
        parts = [_divide([each[owner] for each in sizes], dtype, self._slot_bytes) for owner in range(self._group.size)]
        found = []
        for index in range(max(map(len, parts))):
            of_owners = [each[index] if index < len(each) else [] for each in parts]
            copies = [
                (owner, tuple(
                    (self._slot(owner, rank, part, dtype), shards[part.flat][owner][part.start : part.end])
                    for part in of_owners[owner]
                ))
                for owner in self._others
            ]  # fmt: skip
            received = [
                Contributions(
                    part.flat,
                    part.start,
                    shards[part.flat][rank][part.start : part.end],
                    self._slots[rank].view(dtype)[:, part.offset : part.offset + part.end - part.start],
                )
                for part in of_owners[rank]
            ]
            found.append(Round(tuple(copies), tuple(received)))
        return tuple(found)

    @contextmanager
    def exchange_round(self, part: Round) -> Iterator[None]:
        """Exchanges the contributions of a round; within the context, they can be read on the current stream. All ranks
        of the group run the same rounds in the same order."""
        rank, ranks = self._group.rank, self._group.ranks
        for peer, copies in part.copies:
            self._flags.take(self._read[rank][peer], ranks[peer])
            for into, source in copies:
                into.copy_(source, non_blocking=True)
            self._flags.set(self._arrived[peer][rank], 1)
        for peer in self._others:
            self._flags.take(self._arrived[rank][peer], ranks[peer])
        yield
        for peer in self._others:
            self._flags.set(self._read[peer][rank], 1)

    def _slot(self, owner: int, sender: int, part: "_Part", dtype: torch.dtype) -> Tensor:
        slot = self._slots[owner][sender - (sender > owner)].view(dtype)
        return slot[part.offset : part.offset + part.end - part.start]


class _Part(NamedTuple):
    """Elements `start` to `end` of a shard of one flat tensor, and the first one's index in a slot."""

    flat: int
    start: int
    end: int
    offset: int


def _divide(sizes: Sequence[int], dtype: torch.dtype, slot_bytes: int) -> list[list[_Part]]:
    """Divides consecutive shards of `sizes` elements into rounds, each of which fits in a slot."""
    found, used = [list[_Part]()], 0
    for flat, size in enumerate(sizes):
        start = 0
        while start < size:
            if used == slot_bytes:
                found.append([])
                used = 0
            end = min(size, start + (slot_bytes - used) // dtype.itemsize)
            found[-1].append(_Part(flat, start, end, used // dtype.itemsize))
            used += aligned_bytes(end - start, dtype)
            start = end
    return found


def receive_slot_bytes(units: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype, most: int) -> int:
    """Bytes of one slot of a receive buffer: enough for the largest shard of a unit, unless the slots of all other
    ranks would together exceed `most` bytes. `units`: per unit and flat tensor, sizes of the shards of all ranks."""
    num_ranks = len(units[0][0])
    largest = max(
        sum(aligned_bytes(sizes[rank], dtype) for sizes in unit) for unit in units for rank in range(num_ranks)
    )
    return max(ALIGN, min(largest, most // (num_ranks - 1) // ALIGN * ALIGN))
