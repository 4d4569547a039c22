"""Ring of context-parallel ranks of one host that exchange keys, values and their gradients by copies.

Copies between GPUs run on copy engines, so that all SMs are left to attention, and no collective has to be launched.
All layers of a run share one buffer for the keys and values of a rank, from which the other ranks copy, and one slot
that the previous rank of the ring writes. Flags are binary, so that a CUDA graph can replay a sequence: the rank that
waits for a flag then resets it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.context_ring import RingBuffers
from megatron_moe.config.tp_overlap import NUM_FLAGS
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import Ring, SequencePart, order_by_position, unpack_keys_values
from megatron_moe.parallel.exchange import Wait
from megatron_moe.parallel.sequence_shards import PeerShards, SequenceCollectives, SumContributions, gather_shards
from megatron_moe.parallel.shared_shards import sharing_problem
from megatron_moe.parallel.stream_flags import make_stream_flags
from megatron_moe.parallel.streams import Event, make_streams
from megatron_moe.parallel.symmetric_memory import allocate_symmetric, leading_view


class PeerRing(Ring):
    """Ring through symmetric memory. Results are those of `Ring`, bit for bit.

    All ranks must call the same methods in the same order, and complete a call before they start the next one.
    """

    def __init__(self, buffers: RingBuffers, ctx: ParallelContext) -> None:
        """Allocates the buffers. Collective over cp."""
        super().__init__(group := ctx.group("cp"))
        memory = allocate_symmetric(
            buffers.total(group.size), group, ctx, purpose="exchange keys and values", alternative="--cp-comm-type a2a"
        )
        self.memory = memory[group.rank]
        """Symmetric memory of this rank: keys and values, slot and flags."""
        sizes = buffers.keys_values, buffers.gradients
        self._keys_values, self._slots, words = zip(
            *(part.split([*sizes, len(part) - sum(sizes)]) for part in memory), strict=True
        )
        of_flags = [each.view(torch.int32).view(NUM_FLAGS, group.size, -1) for each in words]
        # indexed by the rank that waits for a flag, then by the rank that sets it
        self._staged, self._copied, self._free, self._arrived = (
            [list(each[kind, :, :1]) for each in of_flags] for kind in range(NUM_FLAGS)
        )
        for flag in self._copied[group.rank]:
            flag.fill_(1)  # no rank has to copy the keys of an earlier call
        self._sources = [(group.rank - step) % group.size for step in range(1, group.size)]
        """The other ranks, in the order of the ring."""
        self._ranks = group.ranks
        self._flags = make_stream_flags(group, ctx, "keys and values")
        # with two streams, copies of gradients need not wait for those of keys
        self._streams = make_streams(ctx.device, "keys", "gradients")

    def circulate(self, k_SBGD: Tensor, v_SBGE: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        for peer in self._sources:
            self._flags.take(self._copied[self.rank][peer], self._ranks[peer])
        shape = *k_SBGD.shape[:3], k_SBGD.shape[3] + v_SBGE.shape[3]
        sent = leading_view(self._keys_values[self.rank], shape, k_SBGD.dtype)
        torch.cat([k_SBGD, v_SBGE], dim=-1, out=sent)
        with self._streams.fork("keys"):
            for peer in self._sources:
                self._flags.set(self._staged[peer][self.rank], 1)
        following: tuple[Tensor, Event] | None = self._copy(self._sources[0], sent)
        yield self.rank, (k_SBGD, v_SBGE)
        for source, after in zip(self._sources, [*self._sources[1:], None], strict=True):
            assert following is not None
            received, copied = following
            self._streams.wait(copied)
            following = None if after is None else self._copy(after, sent)
            yield source, unpack_keys_values(received, k_SBGD.shape[-1])

    def _copy(self, source: int, like: Tensor) -> tuple[Tensor, Event]:
        """Starts to copy the keys and values of rank `source`."""
        received = torch.empty_like(like)
        with self._streams.fork("keys"):
            self._flags.take(self._staged[self.rank][source], self._ranks[source])
            received.copy_(leading_view(self._keys_values[source], like.shape, like.dtype), non_blocking=True)
            self._flags.set(self._copied[source][self.rank], 1)
            return received, self._streams.record()

    def send_to_next(self, x_SBGC: Tensor) -> Wait:
        """See `Ring`. The received tensor is valid until the next call."""
        following, previous = (self.rank + 1) % self.size, self._sources[0]
        # this stream has already read what the previous call received
        self._flags.set(self._free[previous][self.rank], 1)
        with self._streams.fork("gradients"):
            self._flags.take(self._free[self.rank][following], self._ranks[following])
            leading_view(self._slots[following], x_SBGC.shape, x_SBGC.dtype).copy_(x_SBGC, non_blocking=True)
            self._flags.set(self._arrived[following][self.rank], 1)
            copied = self._streams.record()

        def wait() -> Tensor:
            self._streams.wait(copied)  # the copy reads `x_SBGC`
            self._flags.take(self._arrived[self.rank][previous], self._ranks[previous])
            return leading_view(self._slots[self.rank], x_SBGC.shape, x_SBGC.dtype)

        return wait


class ContextPeers(NamedTuple):
    """Communication of the context-parallel ranks through symmetric memory; None where layers use torch's
    collectives."""

    ring: PeerRing | None = None
    shards: PeerShards | None = None

    def gather(self, x_SBC: Tensor, part: SequencePart, ctx: ParallelContext) -> Tensor:
        """All-gathers the rows of all ranks of a sequence and orders them by position. Backward: reduce-scatter."""
        shards = self.shards or SequenceCollectives(ctx.group(part.group))
        return order_by_position(gather_shards(x_SBC, shards), part.of_ranks)


NO_PEERS = ContextPeers()


def new_context_peers(
    ctx: ParallelContext, buffers: RingBuffers | None, shard_bytes: int, sum_contributions_: SumContributions
) -> ContextPeers:
    """Creates the buffers of the context-parallel ranks if they are GPUs that can access each other's memory. `buffers`
    and `shard_bytes`: those of `PeerRing` and `PeerShards`; None and 0 if layers do not use them."""
    if (buffers is None and not shard_bytes) or not may_copy(ctx):
        return NO_PEERS
    ring = None if buffers is None else PeerRing(buffers, ctx)
    return ContextPeers(ring, PeerShards(shard_bytes, ctx, sum_contributions_, "cp") if shard_bytes else None)


def may_copy(ctx: ParallelContext) -> bool:
    """Whether context-parallel ranks are GPUs that can access each other's memory."""
    return ctx.device.type != "cpu" and not sharing_problem(ctx.group("cp"), ctx)


def no_copies_note(ctx: ParallelContext) -> str:
    """Log line if context-parallel GPUs of one host cannot copy from each other's memory; otherwise empty."""
    expected = ctx.config.shares_keys_values and ctx.device.type != "cpu"
    reason = sharing_problem(ctx.group("cp"), ctx) if expected else ""
    return f"context-parallel ranks exchange keys and values by NCCL: {reason}" if reason else ""
