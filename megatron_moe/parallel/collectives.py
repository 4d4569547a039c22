"""Collectives over a group of ranks. With one rank each is a no-op or a copy.

These carry data that no gradient flows through: gradients, metrics, weights.
"""

from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import Group

_OPS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


def all_reduce_(tensor: Tensor, group: Group, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Combines `tensor` over the group, in place on every rank."""
    if group.size > 1:
        dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
    return tensor


def reduce_scatter_flat(out: Tensor, flat: Tensor, group: Group) -> Tensor:
    """Sums `flat` [n * size] over the group; rank r receives part r in `out` [n]."""
    if group.size == 1:
        return out.copy_(flat)
    dist.reduce_scatter_tensor(out, flat, group=group.handle)
    return out


def all_gather_flat(flat: Tensor, shard: Tensor, group: Group) -> Tensor:
    """Fills `flat` [n * size] with the `shard` [n] of every rank, in rank order."""
    if group.size == 1:
        return flat.copy_(shard)
    dist.all_gather_into_tensor(flat, shard, group=group.handle)
    return flat


def broadcast_(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copies the tensor of the group's rank `source` to all of them, in place."""
    if group.size > 1:
        dist.broadcast(tensor, src=group.ranks[source], group=group.handle)
    return tensor


def gather_objects(value: Any, group: Group) -> list[Any]:
    """The value of every rank, in rank order, on every rank. For small host data only."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def barrier(group: Group) -> None:
    """Waits until every rank of the group is here."""
    if group.size > 1:
        all_reduce_(torch.zeros(1, device=group.device), group)
