"""All-gather and reduce-scatter of tensors that sequence or context parallelism shards along dim 0.

`SequenceCollectives` communicates whole tensors through NCCL or Gloo. `PeerShards` (`--tp-comm-overlap`, and context
parallelism inside a host) communicates through symmetric memory, shard by shard: a GEMM multiplies its own shard while
those of the other ranks arrive, and the rows of other ranks are sent while the next rows are computed. Copies between
GPUs run on copy engines, so all SMs are left to persistent GEMMs.

A rank of `PeerShards` has one send buffer for a shard, from which the other ranks copy, and one slot per other rank, to
which that rank writes its part of a sum. Flags are binary, so that a CUDA graph can replay a sequence: the rank that
waits for a flag then resets it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.tp_overlap import NO_EFFECT, NUM_FLAGS, symmetric_bytes
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_gather_flat, reduce_scatter_flat
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.exchange import Wait
from megatron_moe.parallel.shared_shards import sharing_problem
from megatron_moe.parallel.stream_flags import make_stream_flags
from megatron_moe.parallel.streams import Event, make_streams
from megatron_moe.parallel.symmetric_memory import allocate_symmetric, leading_view

SumContributions = Callable[..., None]
"""The op `sum_contributions_` of a kernel set."""
_PURPOSES = MappingProxyType(
    {
        "tp": ("overlap tensor-parallel communication", "--no-tp-comm-overlap"),
        "cp": (
            "gather keys and values",
            "--cp-comm-type a2a (sparse and compressed attention always gather: --context-parallel-size 1)",
        ),
    }
)
"""Axis -> (what `PeerShards` are for, flags that avoid them)."""


class PendingGather(NamedTuple):
    """All-gather in progress."""

    whole: Tensor
    """Gathered tensor [n * rows, ...]. Its content is defined once `parts` is exhausted."""
    parts: Iterator[tuple[slice, Tensor]]
    """Row ranges and their values, in the order in which they arrive. The current stream waits for a part when the
    iterator yields it. A single range covers the whole tensor if the collective has no parts."""

    def wait(self) -> Tensor:
        """Makes the current stream wait for all parts and returns the gathered tensor."""
        for _ in self.parts:
            pass
        return self.whole


class SequenceShards(ABC):
    """Collectives over a group along dim 0, not recorded by autograd."""

    overlaps: bool
    """Whether a collective runs concurrently with GEMMs that are launched before the wait for its result."""

    @abstractmethod
    def start_gather(self, shard: Tensor, *, fills_own_rows: bool = True) -> PendingGather:
        """Starts an all-gather of shards [rows, ...]. If `fills_own_rows` is False, `PendingGather.whole` stays
        undefined in this rank's rows."""

    @abstractmethod
    def start_scatter(self, rows: int, compute: Callable[[slice], Tensor]) -> Wait:
        """Starts a reduce-scatter of partial tensors of `rows` rows; the returned function returns this rank's shard of
        their sum. `compute` returns the given rows of the partial tensor of this rank."""


class SequenceCollectives(SequenceShards):
    """Collectives of torch.distributed. Each communicates the whole tensor, S * B * H elements."""

    overlaps = False

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def start_gather(self, shard: Tensor, *, fills_own_rows: bool = True) -> PendingGather:
        whole, size = shard, self._group.size
        if size > 1:
            shard = shard.contiguous()
            whole = all_gather_flat(shard.new_empty(size * len(shard), *shard.shape[1:]), shard, self._group)
        return PendingGather(whole, iter(((slice(0, len(whole)), whole),)))

    def start_scatter(self, rows: int, compute: Callable[[slice], Tensor]) -> Wait:
        whole, group = compute(slice(0, rows)).contiguous(), self._group
        if group.size == 1:
            return lambda: whole
        own = whole.new_empty(rows // group.size, *whole.shape[1:])
        return lambda: reduce_scatter_flat(own, whole, group)


class PeerShards(SequenceShards):
    """Collectives through symmetric memory and copies, which all layers of a run share.

    All ranks of the group must call the same methods in the same order, and wait for a scatter before they start the
    next one.
    """

    overlaps = True

    def __init__(
        self, slot_bytes: int, ctx: ParallelContext, sum_contributions_: SumContributions, axis: str = "tp"
    ) -> None:
        """Allocates buffers for shards of up to `slot_bytes`. Collective over the group `axis`."""
        self._group = group = ctx.group(axis)
        self._sum_contributions_ = sum_contributions_
        purpose, alternative = _PURPOSES[axis]
        memory = allocate_symmetric(
            symmetric_bytes(slot_bytes, group.size), group, ctx, purpose=purpose, alternative=alternative
        )
        self.memory = memory[group.rank]
        """Symmetric memory of this rank: send buffer, slots and flags."""
        slots = [part[: group.size * slot_bytes].view(group.size, slot_bytes) for part in memory]
        self._sent, self._received = [part[0] for part in slots], [part[1:] for part in slots]
        words = [part[group.size * slot_bytes :].view(torch.int32) for part in memory]
        of_flags = [each.view(NUM_FLAGS, group.size, -1) for each in words]
        # indexed by the rank that waits for a flag, then by the rank that sets it
        self._staged, self._copied, self._arrived, self._summed = (
            [list(each[kind, :, :1]) for each in of_flags] for kind in range(NUM_FLAGS)
        )
        for flag in (*self._copied[group.rank], *self._summed[group.rank]):
            flag.fill_(1)  # the buffers are free
        self._others = [(group.rank + step) % group.size for step in range(1, group.size)]
        """The other ranks; each rank starts with its successor, so that the ranks do not all copy from the same one."""
        self._flags = make_stream_flags(group, ctx, "shards of a sequence")
        # with two streams, copies of a scatter need not wait for those of a gather
        self._streams = make_streams(ctx.device, "gather", "scatter")

    def start_gather(self, shard: Tensor, *, fills_own_rows: bool = True) -> PendingGather:
        group, shard = self._group, shard.contiguous()
        whole = shard.new_empty(group.size * len(shard), *shard.shape[1:])
        parts, events = whole.view(group.size, *shard.shape), list[Event]()
        for peer in self._others:
            self._flags.take(self._copied[group.rank][peer], group.ranks[peer])
        # before the GEMM, on its stream: a copy within the GPU runs on SMs, all of which the GEMM occupies
        leading_view(self._sent[group.rank], shard.shape, shard.dtype).copy_(shard, non_blocking=True)
        with self._streams.fork("gather"):
            for peer in self._others:
                self._flags.set(self._staged[peer][group.rank], 1)
            for peer in self._others:
                self._flags.take(self._staged[group.rank][peer], group.ranks[peer])
                parts[peer].copy_(leading_view(self._sent[peer], shard.shape, shard.dtype), non_blocking=True)
                self._flags.set(self._copied[peer][group.rank], 1)
                events.append(self._streams.record())
            if fills_own_rows:
                parts[group.rank].copy_(shard, non_blocking=True)
            complete = self._streams.record()
        return PendingGather(whole, self._parts(shard, parts, events, complete))

    def _parts(
        self, shard: Tensor, parts: Tensor, events: list[Event], complete: Event
    ) -> Iterator[tuple[slice, Tensor]]:
        yield self._rows(self._group.rank, len(shard)), shard
        for peer, event in zip(self._others, events, strict=True):
            self._streams.wait(event)
            yield self._rows(peer, len(shard)), parts[peer]
        self._streams.wait(complete)

    def start_scatter(self, rows: int, compute: Callable[[slice], Tensor]) -> Wait:
        group, each, sent = self._group, rows // self._group.size, list[Tensor]()
        for peer in self._others:
            part = compute(self._rows(peer, each)).contiguous()
            slot = self._received[peer][group.rank - (group.rank > peer)]
            with self._streams.fork("scatter"):
                self._flags.take(self._summed[group.rank][peer], group.ranks[peer])
                leading_view(slot, part.shape, part.dtype).copy_(part, non_blocking=True)
                self._flags.set(self._arrived[peer][group.rank], 1)
                copied = self._streams.record()
            sent.append(part)
        own = compute(self._rows(group.rank, each)).contiguous()

        def wait() -> Tensor:
            self._streams.wait(copied)
            sent.clear()  # not before, because the copies read them
            for peer in self._others:
                self._flags.take(self._arrived[group.rank][peer], group.ranks[peer])
            total, received = torch.empty_like(own), self._received[group.rank]
            received_PN = received[:, : own.nbytes].view(own.dtype)
            self._sum_contributions_(total.view(-1), own.view(-1), received_PN, group.rank, accumulate=False)
            for peer in self._others:
                self._flags.set(self._summed[peer][group.rank], 1)
            return total

        return wait

    def _rows(self, rank: int, each: int) -> slice:
        return slice(rank * each, (rank + 1) * each)


def gather_shards(shard: Tensor, shards: SequenceShards) -> Tensor:
    """All-gathers a tensor along dim 0, for a result that each rank uses in its own way. Backward: reduce-scatter."""
    return _GatherShards.apply(shard, shards)


class _GatherShards(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, shards: SequenceShards) -> Tensor:
        ctx.shards = shards
        return shards.start_gather(shard).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = grads[0].contiguous()
        return ctx.shards.start_scatter(len(whole), lambda rows: whole[rows])(), None


class LayerCollectives(NamedTuple):
    """Collectives of the GEMMs of one linear layer. A column-parallel layer gathers its input in `fprop`, gathers it
    again for the weight gradient while `dgrad` runs, and scatters its input gradient while `wgrad` runs. A row-parallel
    layer scatters its output in `fprop` and gathers its gradient in `dgrad`."""

    fprop: SequenceShards
    dgrad: SequenceShards
    wgrad: SequenceShards

    @property
    def overlaps(self) -> bool:
        return any(each.overlaps for each in self)


def layer_collectives(ctx: ParallelContext, peers: PeerShards | None = None, layer: str = "") -> LayerCollectives:
    """Collectives of a linear layer: `peers` for the GEMMs that `--tp-comm-overlap` overlaps in layers of the kind
    `layer`, and those of torch.distributed for the others. The default is a layer that never takes part."""
    plain, chosen = SequenceCollectives(ctx.group("tp")), ctx.config.tp_comm_overlap
    passes = [f"{layer}_{each}" for each in LayerCollectives._fields]
    return LayerCollectives(*(plain if peers is None or name not in chosen else peers for name in passes))


def new_peer_shards(ctx: ParallelContext, slot_bytes: int, sum_contributions_: SumContributions) -> PeerShards | None:
    """Creates the buffers of `--tp-comm-overlap`. Returns None if the ranks cannot access each other's memory.
    `slot_bytes`: size of the largest shard; 0 if no GEMM is overlapped."""
    if slot_bytes and not sharing_problem(ctx.group("tp"), ctx):
        return PeerShards(slot_bytes, ctx, sum_contributions_)
    return None


def no_overlap_note(ctx: ParallelContext) -> str:
    """Log line if ranks cannot access each other's memory, although `--tp-comm-overlap` needs it; otherwise empty."""
    reason = sharing_problem(ctx.group("tp"), ctx) if ctx.config.tp_comm_overlap else ""
    return f"{NO_EFFECT}: {reason}" if reason else ""
