"""Differentiable collectives of tensor parallelism, and the entry and exit of tensor-parallel regions.

With one rank each function returns its input. A tensor is *replicated* if every rank of the group holds the same
values, *sharded* if each rank holds one of equal slices, and *partial* if the true value is the sum over the ranks. The
gradient of a replicated tensor is partial if each rank uses the tensor for its own columns or heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.param_meta import Part
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_gather_flat, all_reduce_, reduce_scatter_flat
from megatron_moe.parallel.context import ParallelContext, ProcessGroup


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity for a replicated tensor that each rank uses for its own columns or heads. Backward: all-reduce."""
    return _differentiable(x, group, _identity, _all_reduce)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduces a partial tensor; the result is replicated. Backward: identity."""
    return _differentiable(x, group, _all_reduce, _identity)


def gather_from(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gathers a tensor along `dim`, for a result that all ranks use in the same way. Backward: slice of the
    gradient."""
    return _differentiable(x, group, partial(_all_gather, dim=dim), partial(_slice, dim=dim))


def scatter_to(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Returns this rank's slice of a replicated tensor along `dim`. Backward: all-gather."""
    return _differentiable(x, group, partial(_slice, dim=dim), partial(_all_gather, dim=dim))


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """All-gathers a tensor along `dim`, for a result that each rank uses for its own columns or heads. Backward:
    reduce-scatter of the partial gradient."""
    return _differentiable(x, group, partial(_all_gather, dim=dim), partial(_reduce_scatter, dim=dim))


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Sums a partial tensor over ranks and returns this rank's slice along `dim`. Backward: all-gather."""
    return _differentiable(x, group, partial(_reduce_scatter, dim=dim), partial(_all_gather, dim=dim))


def enter_tensor_parallel(hidden_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Converts the residual stream to the input of a column-parallel matrix, which has all positions on every rank.

    Communication over tp: with sequence parallelism, an all-gather of S * B * H elements (backward: reduce-scatter);
    otherwise none (backward: all-reduce).
    """
    group = ctx.group("tp")
    return all_gather(hidden_SBH, group) if ctx.config.sequence_parallel else copy_to(hidden_SBH, group)


def leave_tensor_parallel(partial_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Converts the partial output of a row-parallel matrix to the residual stream.

    Communication over tp: with sequence parallelism, a reduce-scatter of S * B * H elements along S (backward:
    all-gather); otherwise an all-reduce (backward: none).
    """
    group = ctx.group("tp")
    return reduce_scatter(partial_SBH, group) if ctx.config.sequence_parallel else reduce_from(partial_SBH, group)


def columns_to_residual(columns_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Converts the output of a column-parallel matrix (H / tp channels on this rank) to the residual stream.

    Communication over tp: an all-gather of S * B * H elements (backward: selection of this rank's columns). With
    sequence parallelism, the function then selects this rank's positions (backward: all-gather).
    """
    group = ctx.group("tp")
    hidden_SBH = gather_from(columns_SBH, group, dim=-1)
    return scatter_to(hidden_SBH, group, dim=0) if ctx.config.sequence_parallel else hidden_SBH


def sequence_part(ctx: ParallelContext) -> Part:
    """Returns (index of this rank's shard, number of shards) of the residual stream along S: (0, 1) if it is
    replicated."""
    tp = ctx.group("tp")
    return (tp.rank, tp.size) if ctx.config.sequence_parallel else (0, 1)


def select_local_positions(x_BS: Tensor, ctx: ParallelContext) -> Tensor:
    """Selects the positions of this rank's residual stream from a [B, S] tensor without gradients. Returns [B, S / tp]
    with sequence parallelism, otherwise the whole tensor."""
    index, num_parts = sequence_part(ctx)
    return x_BS if num_parts == 1 else _equal_slice(x_BS, index, num_parts, dim=1)


def gather_shard(shard: Tensor, group: ProcessGroup) -> Tensor:
    """All-gathers along dim 0 without autograd. The backward calls this for inputs that were saved as shards."""
    return shard if group.size == 1 else _all_gather(shard, group, 0)


Collective = Callable[[Tensor, ProcessGroup], Tensor]


class _Differentiable(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.run_backward = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.run_backward(grads[0], ctx.group), None, None, None


def _differentiable(x: Tensor, group: ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    if group.size == 1:
        return x
    return _Differentiable.apply(x, group, forward, backward)


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    shard = x.movedim(dim, 0).contiguous()
    whole = shard.new_empty(group.size * shard.shape[0], *shard.shape[1:])
    return all_gather_flat(whole, shard, group).movedim(0, dim)


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _equal_slice(x, group.rank, group.size, dim).contiguous()


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    whole = x.movedim(dim, 0).contiguous()
    own = torch.empty_like(_equal_slice(whole, group.rank, group.size, 0))
    return reduce_scatter_flat(own, whole, group).movedim(0, dim)


def _equal_slice(x: Tensor, index: int, num_parts: int, dim: int) -> Tensor:
    length = x.shape[dim]
    assert length % num_parts == 0, f"dim {dim} of {tuple(x.shape)} cannot be divided equally among {num_parts} ranks"
    return x.narrow(dim, index * (length // num_parts), length // num_parts)
