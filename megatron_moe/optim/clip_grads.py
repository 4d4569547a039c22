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

    "all" is the norm of all elements of the model, each counted once; "experts", "router" (gate matrices) and "dense"
    (everything else) are norms of its parts. A non-finite element anywhere makes "all" non-finite on every rank.

    Args:
        nonfinite: this rank's flag `Optimizer.nonfinite`. It is summed over ranks in the same collective; the result
            then has an entry "nonfinite", which is above zero if the flag is True on any rank.
    """
    zero = torch.zeros((), dtype=internal_dtype(buffers.grad_dtype), device=buffers.device)
    squares = {part: zero.clone() for part in ("dense", "experts", "router")}
    for buffer in norm_buffers(buffers):
        for grads in buffer.finished_grads():
            squares[_part(buffer)] += buffers.kernels.sum_of_squares(grads)
    flags = [] if nonfinite is None else [nonfinite.to(zero.dtype)]
    # collective over world: 16 or 32 bytes
    sums = sum_over_world(torch.stack([*squares.values(), *flags]), buffers, context)
    norms = {"all": sums[: len(squares)].sum().sqrt()}
    norms |= {part: square.sqrt() for part, square in zip(squares, sums, strict=False)}
    return norms if nonfinite is None else {**norms, "nonfinite": sums[-1]}


def norm_buffers(buffers: GradBuffers) -> Iterator[FlatBuffer]:
    """Yields the buffers whose owned ranges this rank adds to norms and other sums over the model, so that each element
    is counted once."""
    for buffer in buffers.buffers:
        if buffers.owns_whole_model or buffer.counts:
            yield buffer


def sum_over_world(sums: Tensor, buffers: GradBuffers, context: ParallelContext) -> Tensor:
    """Converts `sums` over this rank's `norm_buffers` buffers into sums over the model, by an all-reduce in place.

    If every rank owns the whole model, `sums` are already bitwise equal on all ranks and are not reduced.
    Otherwise one collective returns the same bits on all ranks, so all ranks clip by the same factor.
    """
    return sums if buffers.owns_whole_model else all_reduce_(sums, context.group("world"))


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """Clip factor, a scalar on the device: min(1, clip_grad / (norm + 1e-6)), or 1 if `clip_grad` is 0."""
    if clip_grad == 0.0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)


def count_zeros(buffers: GradBuffers) -> Tensor:
    """Number of gradient elements of the model that are exactly zero, int64 scalar on the device."""
    zeros = torch.zeros((), dtype=torch.int64, device=buffers.device)
    for buffer in norm_buffers(buffers):
        for (start, end), grads in zip(buffer.owned, buffer.finished_grads(), strict=True):
            zeros += buffer.layout.num_elements(start, end) - torch.count_nonzero(grads)
    # collective over world: 8 bytes
    return sum_over_world(zeros, buffers, buffers.context)


def _part(buffer: FlatBuffer) -> str:
    if buffer.key.grid == "expert":
        return "experts"
    return "router" if buffer.key.router else "dense"
