"""Shards of flat tensors in symmetric memory, which the other ranks of the host copy without a collective.

Copies between GPUs run on copy engines and leave all SMs to the GEMMs that they overlap with; an NCCL kernel would
occupy some SMs, which slows down persistent GEMMs. The rank that owns a shard takes no part in the copy, so the caller
must order copies and writes of shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.symmetric_memory import allocate_symmetric, has_peer_access

ALIGN = 512
"""Alignment in bytes of flat tensors in shared memory."""


@dataclass(frozen=True)
class SharedShards:
    """Shards of one flat tensor, in rank order; this process can read those of all ranks."""

    shards: tuple[Tensor, ...]
    rank: int
    """Index of this rank in the group."""

    @property
    def own(self) -> Tensor:
        return self.shards[self.rank]

    def gather_into(self, flat: Tensor) -> None:
        """Copies the shards of all ranks to `flat` on the current stream."""
        for part, shard in zip(flat.split([len(shard) for shard in self.shards]), self.shards, strict=True):
            part.copy_(shard, non_blocking=True)


class SharedRegion:
    """Symmetric memory of a group, divided into shards."""

    def __init__(self, num_bytes: int, group: ProcessGroup, context: ParallelContext) -> None:
        """Allocates `num_bytes` on every rank. Collective over the group."""
        self._memory = allocate_symmetric(
            num_bytes, group, context, purpose="gather weights", alternative="--fsdp-gather-backend nccl"
        )
        self._rank = group.rank
        self._ends = [0] * group.size

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype) -> SharedShards:
        """Allocates one shard per rank, of `sizes` elements, which may be 0. All ranks of the group must allocate the
        same shards in the same order."""
        shards = []
        for rank, size in enumerate(sizes):
            start = self._ends[rank]
            self._ends[rank] += aligned_bytes(size, dtype)
            shards.append(self._memory[rank][start : start + size * dtype.itemsize].view(dtype))
        return SharedShards(tuple(shards), self._rank)


def aligned_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes that a flat tensor of `size` elements occupies in a region: its size, rounded up to a multiple of
    `ALIGN`."""
    return -(-size * dtype.itemsize // ALIGN) * ALIGN


def can_share(group: ProcessGroup, context: ParallelContext) -> bool:
    """Whether the ranks of the group can access each other's memory."""
    return group.size > 1 and not sharing_problem(group, context)


def sharing_problem(group: ProcessGroup, context: ParallelContext) -> str:
    """Reason why ranks of the group cannot access each other's memory; empty if they can."""
    on_host = context.process.local_world_size
    num_hosts = len({rank // on_host for rank in group.ranks})
    if num_hosts > 1:
        return f"their {group.size} ranks are on {num_hosts} hosts"
    return "" if has_peer_access(group, context) else "GPUs of this host cannot access each other's memory"
