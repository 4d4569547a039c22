"""Activation recomputation (checkpointing): saves the inputs of a function and reruns it in backward.

Random numbers depend only on keys (`parallel/rng.py`), so the rerun draws the values of the first forward. Each side
effect happens once: the first forward records metrics; the rerun attaches the gradients of balancing losses and counts
the tokens per expert (docs/decisions/0104).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_gather_flat, shard_of
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.precision.carried_copies import without_copy


def checkpoint(
    forward: Callable[..., Tensor],
    recompute: Callable[..., Tensor],
    *tensors: Tensor,
    shard_over: ProcessGroup | None = None,
) -> Tensor:
    """Returns `forward(*tensors)`. The backward pass runs `recompute(*tensors)` and differentiates it.

    Both functions compute the same values but may record different metrics. In no-grad mode, only `forward` runs.
    `shard_over`: group of ranks with equal `tensors`; each saves a shard. If None, tensors are saved whole."""
    if not torch.is_grad_enabled():
        return forward(*tensors)
    # Parameters need gradients even if no input does.
    anchor = tensors[0].new_empty(0).requires_grad_()
    return _Checkpoint.apply(anchor, forward, recompute, shard_over, *tensors)


class _Checkpoint(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        forward: Callable[..., Tensor],
        recompute: Callable[..., Tensor],
        group: ProcessGroup | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.recompute, ctx.group = recompute, group
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.save_for_backward(*(_shard(tensor, group) for tensor in tensors))
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        whole = [_gather(saved, shape, ctx.group) for saved, shape in zip(ctx.saved_tensors, ctx.shapes, strict=True)]
        inputs = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(whole, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.recompute(*inputs)
        # Not `autograd.grad`, which would return the gradients of parameters instead of accumulating them.
        torch.autograd.backward(out, grads[0])
        return None, None, None, None, *(tensor.grad for tensor in inputs)


def _shard(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns a copy of this rank's shard of the flattened tensor, or the tensor itself if `group` is None."""
    if group is None:
        return without_copy(tensor)
    size = tensor.numel()
    assert size % group.size == 0, f"{size} elements cannot be divided equally among {group.size} ranks"
    return shard_of(tensor.detach().flatten(), group).clone()


def _gather(shard: Tensor, shape: torch.Size, group: ProcessGroup | None) -> Tensor:
    """All-gathers the shards that `_shard` made into a tensor of the given shape."""
    if group is None:
        return shard
    # collective over tp: one hidden state, not differentiable
    return all_gather_flat(shard.new_empty(shape.numel()), shard, group).view(shape)
