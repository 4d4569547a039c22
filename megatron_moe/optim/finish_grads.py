"""Finishes the gradients of a step: sums them over ranks, in flat buckets.

Afterwards the gradients of both grids mean the same thing: the derivative of the loss over the global batch. A
parameter of the attention grid is replicated over dp x cp ranks, an expert over edp ranks, but both saw the tokens of
all dp x cp ranks (the expert's came through dispatch), so both are divided by dp x cp.
"""

from torch import Tensor

from megatron_moe.optim.grad_buffers import FlatBuffer, GradBuffers
from megatron_moe.optim.param_gather import tensor_group
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext


def finish_grads(buffers: GradBuffers, context: ParallelContext, *, token_count: Tensor | None = None) -> None:
    """Completes, reduces and scales all gradients, in place; with a sharded optimizer what this rank owns of them.

    Without `token_count` the ranks' losses are means and the gradient is the mean over ranks. With it (per-token loss)
    they are sums over tokens: gradients are summed and divided by `token_count`, the tokens of the global batch as a
    scalar on the device. No token at all leaves a gradient of zero.
    """
    in_collective = buffers.data_parallel.average_in_collective
    assert token_count is None or not in_collective, "a mean over ranks of gradients that are sums over tokens"
    buffers.complete()
    buffers.reducer.finish()
    num_ranks = context.group("dp_cp").size
    for buffer in buffers.buffers:
        share = (buffer.group.size if in_collective else 1) / num_ranks
        for grads in buffer.owned_parts(buffer.grads):
            _sum_parts(grads, buffer, context)
            if token_count is not None:
                grads.div_(token_count.clamp(min=1).to(grads.dtype))
            elif share != 1.0:
                grads.mul_(share)


def _sum_parts(grads: Tensor, buffer: FlatBuffer, context: ParallelContext) -> None:
    """Sums what ranks of the same data-parallel place computed of one gradient. They own the same ranges."""
    if buffer.key.partial:
        # tp or etp: norms, gates and biases, a few H-wide vectors and E * H per layer
        all_reduce_(grads, context.group(tensor_group(buffer.key.grid)))
    if buffer.key.shared_stages:
        # embedding: the word embedding, V * H elements over its shards
        all_reduce_(grads, context.group("embedding"))
