"""Collectives over a group of ranks. With one rank each is a no-op or a copy.

These carry data that no gradient flows through: gradients, metrics, weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ProcessGroup

_OPS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


def all_reduce_(tensor: Tensor, group: ProcessGroup, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Combines `tensor` over the group, in place on every rank."""
    if group.size > 1:
        dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
    return tensor


def reduce_scatter_flat(out: Tensor, flat: Tensor, group: ProcessGroup) -> Tensor:
    """Sums `flat` [n * size] over the group; rank r receives part r in `out` [n]."""
    if group.size == 1:
        return out.copy_(flat)
    dist.reduce_scatter_tensor(out, flat, group=group.handle)
    return out


def all_gather_flat(flat: Tensor, shard: Tensor, group: ProcessGroup) -> Tensor:
    """Fills `flat` [n * size] with the `shard` [n] of every rank, in rank order."""
    if group.size == 1:
        return flat.copy_(shard)
    dist.all_gather_into_tensor(flat, shard, group=group.handle)
    return flat


@dataclass(frozen=True)
class PendingCollective:
    """A collective under way on one tensor."""

    work: dist.Work | None = None
    land: Callable[[], object] | None = None
    """What is left to do on the host when the ranks have exchanged their data."""

    def wait(self) -> None:
        """Afterwards the tensor may be used by the current stream, on a CPU by everyone."""
        if self.work is not None:
            self.work.wait()
        if self.land is not None:
            self.land()


def part_of(flat: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of `flat` [n * size]: a view [n]."""
    return flat.chunk(group.size)[group.rank]


def start_all_reduce_(flat: Tensor, group: ProcessGroup, *, mean: bool = False) -> PendingCollective:
    """Begins to sum `flat` over the group in place, or to take its mean."""
    if group.size == 1:
        return PendingCollective()
    native_mean = mean and _nccl(group)
    work = dist.all_reduce(flat, _mean_or_sum(native_mean), group=group.handle, async_op=True)
    return PendingCollective(work, (lambda: flat.div_(group.size)) if mean and not native_mean else None)


def start_reduce_scatter_(
    flat: Tensor, group: ProcessGroup, *, mean: bool = False, wide: bool = False
) -> PendingCollective:
    """Begins to sum `flat` [n * size] over the group, or to take its mean, into each rank's own part of it.

    What the other parts hold afterwards is undefined. With `wide` a format narrower than fp32 travels as it is, but is
    summed in fp32.
    """
    if group.size == 1:
        return PendingCollective()
    part = part_of(flat, group)
    if wide:
        return _start_wide_reduce_scatter_(part, flat, group, mean=mean)
    if _nccl(group):
        return PendingCollective(
            dist.reduce_scatter_tensor(part, flat, _mean_or_sum(mean), group=group.handle, async_op=True)
        )
    # Only NCCL may write its result over its input.
    total = torch.empty_like(part)
    work = dist.reduce_scatter_tensor(total, flat, group=group.handle, async_op=True)
    return PendingCollective(work, lambda: part.copy_(total.div_(group.size) if mean else total))


def start_all_gather_(flat: Tensor, group: ProcessGroup) -> PendingCollective:
    """Begins to fill `flat` [n * size] with every rank's own part of it."""
    if group.size == 1:
        return PendingCollective()
    return PendingCollective(dist.all_gather_into_tensor(flat, part_of(flat, group), group=group.handle, async_op=True))


def _start_wide_reduce_scatter_(part: Tensor, flat: Tensor, group: ProcessGroup, *, mean: bool) -> PendingCollective:
    received = torch.empty_like(flat)
    work = dist.all_to_all_single(received, flat, group=group.handle, async_op=True)

    def add_up() -> None:
        rows = received.view(group.size, -1)
        wide = torch.promote_types(flat.dtype, torch.float32)
        part.copy_(rows.mean(0, dtype=wide) if mean else rows.sum(0, dtype=wide))

    return PendingCollective(work, add_up)


def _mean_or_sum(mean: bool) -> Any:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def _nccl(group: ProcessGroup) -> bool:
    return group.device.type == "cuda" and dist.get_backend(group.handle) == "nccl"


def broadcast_(tensor: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """Copies the tensor of the group's rank `source` to all of them, in place."""
    if group.size > 1:
        dist.broadcast(tensor, src=group.ranks[source], group=group.handle)
    return tensor


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """The value of every rank, in rank order, on every rank. For small host data only."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def barrier(group: ProcessGroup) -> None:
    """Waits until every rank of the group is here."""
    if group.size > 1:
        all_reduce_(torch.zeros(1, device=group.device), group)
