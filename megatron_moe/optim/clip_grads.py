"""The global gradient norm and the clip factor. All results stay on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.optim.grad_buffers import FlatBuffer, GradBuffers
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext


def gradient_norms(
    buffers: GradBuffers, context: ParallelContext, nonfinite: Tensor | None = None
) -> dict[str, Tensor]:
    """L2 norms of the finished gradients, scalars in promote(fp32, accumulation dtype).

    "all" is the true norm: every element of the model counts once. Its parts are "experts", "router" (gate matrices)
    and "dense" (everything else). A non-finite element anywhere makes "all" non-finite on every rank.

    Args:
        nonfinite: bool scalar of this rank (`Optimizer.nonfinite`). It is summed over ranks in the same collective;
            "nonfinite" of the result is above zero where any rank has set it.
    """
    zero = torch.zeros((), dtype=internal_dtype(buffers.grad_dtype), device=buffers.device)
    squares = {part: zero.clone() for part in ("dense", "experts", "router")}
    for buffer in counted(buffers):
        for grads in buffer.owned_parts(buffer.grads):
            squares[_part(buffer)] += buffers.kernels.sum_of_squares(grads)
    flags = [] if nonfinite is None else [nonfinite.to(zero.dtype)]
    # world: 16 or 32 bytes
    sums = over_the_world(torch.stack([*squares.values(), *flags]), buffers, context)
    norms = {"all": sums[: len(squares)].sum().sqrt()}
    norms |= {part: square.sqrt() for part, square in zip(squares, sums, strict=False)}
    return norms if nonfinite is None else {**norms, "nonfinite": sums[-1]}


def counted(buffers: GradBuffers) -> Iterator[FlatBuffer]:
    """Buffers whose owned ranges this rank counts: all buffers if the rank owns the whole model."""
    for buffer in buffers.buffers:
        if buffers.whole or buffer.counts:
            yield buffer


def over_the_world(sums: Tensor, buffers: GradBuffers, context: ParallelContext) -> Tensor:
    """Sums per-rank counts over the world in place, so that every element of the model counts once.

    No-op on ranks that own the whole model: their values are bitwise equal. Otherwise one collective gives all ranks
    the same bits, so all clip by the same factor.
    """
    return sums if buffers.whole else all_reduce_(sums, context.group("world"))


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """clip / (norm + 1e-6) where that is below 1, else 1; always 1 when `clip_grad` is 0. A scalar on the device."""
    if clip_grad == 0.0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)


def count_zeros(buffers: GradBuffers) -> Tensor:
    """Elements of the finished gradients that are exactly zero, int64 scalar on the device."""
    zeros = torch.zeros((), dtype=torch.int64, device=buffers.device)
    for buffer in counted(buffers):
        for (start, end), grads in zip(buffer.owned, buffer.owned_parts(buffer.grads), strict=True):
            zeros += buffer.layout.elements(start, end) - torch.count_nonzero(grads)
    # world: 8 bytes
    return over_the_world(zeros, buffers, buffers.context)


def _part(buffer: FlatBuffer) -> str:
    if buffer.key.grid == "expert":
        return "experts"
    return "router" if buffer.key.router else "dense"
