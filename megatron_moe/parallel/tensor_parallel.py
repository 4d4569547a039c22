"""Collectives that gradients flow through, and the way in and out of what tensor parallel ranks share out.

Each function states what it does and what its backward does. With one rank each returns its input.

A tensor is *replicated* when every rank of the group holds the same, *cut* when each holds one of equal slices, and
*partial* when the true value is the sum over the ranks. The gradient of a replicated tensor may be partial too: then
every rank has used it for something else (its own columns, its own heads).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.collectives import all_gather_flat, all_reduce_, reduce_scatter_flat
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.param_meta import Part


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Replicated to replicated, for uses that differ between the ranks. Backward: all-reduce of partial gradients."""
    return _exchange(x, group, _same, _total)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial to replicated: all-reduce. Backward: the gradient, which is replicated, as it is."""
    return _exchange(x, group, _total, _same)


def gather_from(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Cut along `dim` to replicated: all-gather. Backward: this rank's slice of the replicated gradient."""
    return _exchange(x, group, partial(_join, dim=dim), partial(_slice, dim=dim))


def scatter_to(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Replicated to cut along `dim`: this rank's slice. Backward: all-gather."""
    return _exchange(x, group, partial(_slice, dim=dim), partial(_join, dim=dim))


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Cut along `dim` to replicated, for uses that differ between the ranks. Backward: reduce-scatter of partial
    gradients."""
    return _exchange(x, group, partial(_join, dim=dim), partial(_slice_of_total, dim=dim))


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Partial to cut along `dim`. Backward: all-gather."""
    return _exchange(x, group, partial(_slice_of_total, dim=dim), partial(_join, dim=dim))


def enter_tensor_parallel(hidden_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """The residual stream for a matrix whose outputs are cut: all positions, on every rank.

    tp: with sequence parallelism all-gather of S * B * H elements, backward reduce-scatter; without, nothing, backward
    all-reduce.
    """
    group = ctx.group("tp")
    return all_gather(hidden_SBH, group) if ctx.config.sequence_parallel else copy_to(hidden_SBH, group)


def leave_tensor_parallel(partial_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Back to the residual stream from a matrix whose inputs are cut: sums over the ranks.

    tp: with sequence parallelism reduce-scatter of S * B * H elements, each rank keeps its positions, backward
    all-gather; without, all-reduce, backward nothing.
    """
    group = ctx.group("tp")
    return reduce_scatter(partial_SBH, group) if ctx.config.sequence_parallel else reduce_from(partial_SBH, group)


def columns_to_residual(columns_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Back to the residual stream from a matrix whose outputs, H / tp on this rank, are its channels.

    tp: all-gather of S * B * H elements, backward this rank's columns; with sequence parallelism each rank then keeps
    its positions, backward all-gather.
    """
    group = ctx.group("tp")
    hidden_SBH = gather_from(columns_SBH, group, dim=-1)
    return scatter_to(hidden_SBH, group, dim=0) if ctx.config.sequence_parallel else hidden_SBH


def sequence_part(ctx: ParallelContext) -> Part:
    """(index, number) of this rank's stretch of the residual stream along S."""
    tp = ctx.group("tp")
    return (tp.rank, tp.size) if ctx.config.sequence_parallel else (0, 1)


def my_positions(x_BS: Tensor, ctx: ParallelContext) -> Tensor:
    """What of a [B, S] tensor belongs to this rank's stretch of the residual stream, [B, S / tp] under sequence
    parallelism. No gradient."""
    index, num_parts = sequence_part(ctx)
    return x_BS if num_parts == 1 else _equal_slice(x_BS, index, num_parts, dim=1)


def rejoin(shard: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather along dim 0 outside autograd, for inputs that are saved for backward as shards."""
    return shard if group.size == 1 else _join(shard, group, 0)


Step = Callable[[Tensor, ProcessGroup], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Step, back: Step) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.group), None, None, None


def _exchange(x: Tensor, group: ProcessGroup, there: Step, back: Step) -> Tensor:
    if group.size == 1:
        return x
    return _Exchange.apply(x, group, there, back)  # type: ignore[no-untyped-call,no-any-return]


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _total(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)


def _join(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    shard = x.movedim(dim, 0).contiguous()
    whole = shard.new_empty(group.size * shard.shape[0], *shard.shape[1:])
    return all_gather_flat(whole, shard, group).movedim(0, dim)


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _equal_slice(x, group.rank, group.size, dim).contiguous()


def _slice_of_total(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    whole = x.movedim(dim, 0).contiguous()
    own = torch.empty_like(_equal_slice(whole, group.rank, group.size, 0))
    return reduce_scatter_flat(own, whole, group).movedim(0, dim)


def _equal_slice(x: Tensor, index: int, num_parts: int, dim: int) -> Tensor:
    length = x.shape[dim]
    assert length % num_parts == 0, f"dim {dim} of {tuple(x.shape)} does not divide among {num_parts} ranks"
    return x.narrow(dim, index * (length // num_parts), length // num_parts)
