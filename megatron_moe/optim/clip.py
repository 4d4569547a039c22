"""The global gradient norm and the clip factor. All results stay on the device."""

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.optim.buckets import FlatBuffer, GradBuffers
from megatron_moe.parallel.context import ParallelContext


def gradient_norms(buffers: GradBuffers, context: ParallelContext) -> dict[str, Tensor]:
    """L2 norms of the finished gradients, scalars in promote(fp32, accumulation dtype).

    "all" is the true norm: every element of the model counts once. Its parts are "experts", "router" (gate matrices)
    and "dense" (everything else). A non-finite element anywhere makes "all" non-finite on every rank.
    """
    spec = context.spec
    # Every rank holds the whole model, so its own sum is the global one.
    assert (spec.tp, spec.pp, spec.ep, spec.etp) == (1, 1, 1, 1), f"norm over a model split as {spec}"
    zero = torch.zeros((), dtype=internal_dtype(buffers.grad_dtype), device=buffers.device)
    squares = {part: zero.clone() for part in ("dense", "experts", "router")}
    for buffer in buffers.buffers:
        squares[_part(buffer)] += buffers.kernels.sum_of_squares(buffer.grads)
    total = torch.stack(list(squares.values())).sum()
    return {"all": total.sqrt()} | {part: square.sqrt() for part, square in squares.items()}


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """clip / (norm + 1e-6) where that is below 1, else 1; always 1 when `clip_grad` is 0. A scalar on the device."""
    if clip_grad == 0.0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)


def count_zeros(buffers: GradBuffers) -> Tensor:
    """Elements of the finished gradients that are exactly zero, int64 scalar on the device."""
    counts = [
        buffer.layout.size - buffer.layout.padding - torch.count_nonzero(buffer.grads) for buffer in buffers.buffers
    ]
    return torch.stack(counts).sum()


def _part(buffer: FlatBuffer) -> str:
    if buffer.key.grid == "expert":
        return "experts"
    return "router" if buffer.key.router else "dense"
