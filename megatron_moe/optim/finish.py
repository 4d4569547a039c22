"""Finishes the gradients of a step: sums them over data-parallel ranks, in flat buckets.

Afterwards the gradients of both grids mean the same thing: the derivative of the loss over the global batch. A
parameter of the attention grid is replicated over dp x cp ranks, an expert over edp ranks, but both saw the tokens of
all dp x cp ranks (the expert's came through dispatch), so both are divided by dp x cp.
"""

import torch
from torch import Tensor

from megatron_moe.optim.buckets import GradBuffers
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.params import Grid


def finish_gradients(buffers: GradBuffers, context: ParallelContext, *, token_count: Tensor | None = None) -> None:
    """Completes, reduces and scales all gradients, in place.

    Without `token_count` the ranks' losses are means and the gradient is the mean over ranks. With it (per-token loss)
    they are sums over tokens: gradients are summed and divided by `token_count`, the tokens of the global batch as a
    scalar on the device. No token at all leaves a gradient of zero.
    """
    buffers.complete()
    sum_partial_gradients(buffers, context)
    num_ranks = context.group("dp_cp").size
    for buffer in buffers.buffers:
        if token_count is None and num_ranks > 1:
            buffer.grads.mul_(1.0 / num_ranks)
        group = context.group(reduction_group(buffer.key.grid))
        for start, end in buffer.layout.buckets:
            # dp_cp or edp: one bucket, by default 40 million elements
            all_reduce_(buffer.grads[start:end], group)
        if token_count is not None:
            buffer.grads.div_(token_count.clamp(min=1).to(buffer.grads.dtype))


def sum_partial_gradients(buffers: GradBuffers, context: ParallelContext) -> None:
    """Sums, in place, the gradients of which each tensor parallel rank computed a part (`ParamMeta.partial_over_tp`)."""
    group = context.group("tp")
    grads = [slot.main_grad for slot in buffers.slots if slot.parameter.meta.partial_over_tp]
    if group.size == 1 or not grads:
        return
    # tp: norms, gates and biases, a few H-wide vectors and E * H per layer, as one collective
    flat = all_reduce_(torch.cat([grad.flatten() for grad in grads]), group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def reduction_group(grid: Grid) -> str:
    """The ranks over which a parameter of this grid is replicated and saw different tokens."""
    return "edp" if grid == "expert" else "dp_cp"
