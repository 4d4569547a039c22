"""Collectives outside autograd, for gradients, metrics and weights. With one rank they are no-ops or copies."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ProcessGroup

_OPS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


def ignore_renamed_collectives() -> None:
    """Filters torch's deprecation warnings on collectives, whose new names torch 2.11 does not have."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def all_reduce_(tensor: Tensor, group: ProcessGroup, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduces `tensor` over the group, in place on every rank."""
    if group.size > 1:
        dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
    return tensor


def sum_counts(counts: Tensor, group: ProcessGroup) -> Tensor:
    """Returns counts of the tokens of a microbatch, summed over the group in int32; `counts` is not changed.

    Int32 is exact because a token counts at most once: 2**31 tokens in a microbatch would need 262,144 ranks with 8,192
    tokens each.
    """
    return counts if group.size == 1 else all_reduce_(counts.to(torch.int32, copy=True), group)


def reduce_scatter_flat(out: Tensor, flat: Tensor, group: ProcessGroup) -> Tensor:
    """Sums `flat` [group size * n] over the group and writes this rank's shard of the sum to `out` [n]."""
    if group.size == 1:
        return out.copy_(flat)
    dist.reduce_scatter_tensor(out, flat, group=group.handle)
    return out


def all_gather_flat(flat: Tensor, shard: Tensor, group: ProcessGroup) -> Tensor:
    """Fills `flat` [group size * n] with the `shard` [n] of every rank, in rank order."""
    if group.size == 1:
        return flat.copy_(shard)
    dist.all_gather_into_tensor(flat, shard, group=group.handle)
    return flat


@dataclass(frozen=True)
class PendingCollective:
    """Asynchronous collective on one tensor; already complete if `work` is None."""

    work: dist.Work | None = None
    finish: Callable[[], object] | None = None
    """Function that `wait` calls to complete the result, e.g. to divide a sum by the group size."""

    def wait(self) -> None:
        """Makes the current stream (on a CPU, the host) wait for the result."""
        if self.work is not None:
            self.work.wait()
        if self.finish is not None:
            self.finish()


Sizes = Sequence[int] | None
"""Number of elements in the shard of each rank of a group, in rank order; None means that all shards have equal
size."""


def shard_of(flat: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
    """View of this rank's shard of `flat`, which consists of the shards of all ranks."""
    return (flat.chunk(group.size) if sizes is None else flat.split(list(sizes)))[group.rank]


def start_all_reduce_(flat: Tensor, group: ProcessGroup, *, mean: bool = False) -> PendingCollective:
    """Starts an in-place all-reduce of `flat`, which computes the sum over the group, or the mean if `mean`."""
    if group.size == 1:
        return PendingCollective()
    native_mean = mean and _is_nccl(group)
    work = dist.all_reduce(flat, _mean_or_sum(native_mean), group=group.handle, async_op=True)
    return PendingCollective(work, (lambda: flat.div_(group.size)) if mean and not native_mean else None)


def start_reduce_scatter_(
    flat: Tensor, group: ProcessGroup, *, sizes: Sizes = None, mean: bool = False, fp32_sums: bool = False
) -> PendingCollective:
    """Starts a reduce-scatter of `flat` that writes the sum or mean to this rank's shard of `flat`.

    The other shards are undefined afterwards. With `fp32_sums`, values are communicated in the dtype of `flat` but
    summed in fp32. `sizes`: sizes of the shards, which may be 0.
    """
    if group.size == 1:
        return PendingCollective()
    shard = shard_of(flat, group, sizes)
    if fp32_sums:
        return _start_fp32_reduce_scatter_(shard, flat, group, sizes, mean=mean)
    if _is_nccl(group):
        if sizes is None:
            work = dist.reduce_scatter_tensor(shard, flat, _mean_or_sum(mean), group=group.handle, async_op=True)
        else:  # one reduction per rank, launched together in one NCCL group
            parts = list(flat.split(list(sizes)))
            work = dist.reduce_scatter(shard, parts, _mean_or_sum(mean), group=group.handle, async_op=True)
        return PendingCollective(work)
    if sizes is not None:  # gloo does not support reduce-scatter with unequal shards
        return start_all_reduce_(flat, group, mean=mean)
    # Only NCCL may write the result into its input buffer.
    total = torch.empty_like(shard)
    work = dist.reduce_scatter_tensor(total, flat, group=group.handle, async_op=True)
    return PendingCollective(work, lambda: shard.copy_(total.div_(group.size) if mean else total))


def start_all_gather_(flat: Tensor, group: ProcessGroup, sizes: Sizes = None) -> PendingCollective:
    """Starts an in-place all-gather: fills `flat` with the shards of all ranks. `sizes`: sizes of the shards, which may
    be 0."""
    if group.size == 1:
        return PendingCollective()
    shard = shard_of(flat, group, sizes)
    if sizes is None:
        return PendingCollective(dist.all_gather_into_tensor(flat, shard, group=group.handle, async_op=True))
    if dist.get_backend(group.handle) == "fake":  # would copy this rank's shard to parts of other sizes
        return PendingCollective()
    parts = list(flat.split(list(sizes)))
    if _is_nccl(group):  # one broadcast per rank, launched together in one NCCL group
        return PendingCollective(dist.all_gather(parts, shard, group=group.handle, async_op=True))
    for source, part in enumerate(parts):  # gloo can gather only equal shards
        broadcast_(part, group, source)
    return PendingCollective()


def _start_fp32_reduce_scatter_(
    shard: Tensor, flat: Tensor, group: ProcessGroup, sizes: Sizes, *, mean: bool
) -> PendingCollective:
    received = flat.new_empty(group.size * len(shard))
    send_sizes = None if sizes is None else [len(shard)] * group.size
    receive_sizes = None if sizes is None else list(sizes)
    work = dist.all_to_all_single(received, flat, send_sizes, receive_sizes, group=group.handle, async_op=True)

    def sum_received() -> None:
        rows = received.view(group.size, -1)
        wide = torch.promote_types(flat.dtype, torch.float32)
        shard.copy_(rows.mean(0, dtype=wide) if mean else rows.sum(0, dtype=wide))

    return PendingCollective(work, sum_received)


def _mean_or_sum(mean: bool) -> Any:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def _is_nccl(group: ProcessGroup) -> bool:
    """Whether NCCL runs the group's collectives, or a fake backend, which emulates NCCL, skips them."""
    backend = dist.get_backend(group.handle)
    return backend == "fake" or (group.device.type == "cuda" and backend == "nccl")


def broadcast_(tensor: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """Broadcasts `tensor` from the group's rank `source` to all ranks of the group, in place."""
    if group.size > 1 and tensor.numel():
        dist.broadcast(tensor, src=group.ranks[source], group=group.handle)
    return tensor


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Returns the `value` of every rank, in rank order, on all ranks. For small host objects only."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def start_all_gathers_(
    flats: Sequence[Tensor], shards: Sequence[Tensor], group: ProcessGroup, sizes: Sequence[Sizes]
) -> list[PendingCollective]:
    """Starts all-gathers that fill each tensor of `flats` with the `shards` of all ranks, with NCCL in one launch."""
    if group.size > 1 and _is_coalescing(group) and not any(sizes):
        with dist._coalescing_manager(group.handle, async_ops=True) as work:  # type: ignore[no-untyped-call]
            for flat, shard in zip(flats, shards, strict=True):
                dist.all_gather_into_tensor(flat, shard, group=group.handle, async_op=True)
        return [PendingCollective(work)]
    for flat, shard, unequal in zip(flats, shards, sizes, strict=True):
        shard_of(flat, group, unequal).copy_(shard)
    return [start_all_gather_(flat, group, unequal) for flat, unequal in zip(flats, sizes, strict=True)]


def start_reduce_scatters_(
    flats: Sequence[Tensor], group: ProcessGroup, sizes: Sequence[Sizes], *, fp32_sums: bool = False
) -> list[PendingCollective]:
    """Starts reduce-scatters as `start_reduce_scatter_` does, with NCCL in one launch."""
    if group.size > 1 and _is_coalescing(group) and not any(sizes) and not fp32_sums:
        with dist._coalescing_manager(group.handle, async_ops=True) as work:  # type: ignore[no-untyped-call]
            for flat in flats:
                dist.reduce_scatter_tensor(shard_of(flat, group), flat, group=group.handle, async_op=True)
        return [PendingCollective(work)]
    return [
        start_reduce_scatter_(flat, group, sizes=unequal, fp32_sums=fp32_sums)
        for flat, unequal in zip(flats, sizes, strict=True)
    ]


def _is_coalescing(group: ProcessGroup) -> bool:
    return group.device.type == "cuda" and dist.get_backend(group.handle) == "nccl"
