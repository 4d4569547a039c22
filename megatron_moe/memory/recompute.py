"""Parts of the forward that run twice: first without a graph, and again in the backward, where they are differentiated.

Between the two only the inputs are kept. Random draws are keyed by what they are for (`parallel/rng.py`), so the second
forward draws the numbers of the first; metrics are recorded in the first, and what enters the gradient or is counted
for the update of the routers belongs to the second (docs/decisions/0104). Weight gradients arise in the second alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.collectives import all_gather_flat
from megatron_moe.parallel.context import ProcessGroup


def checkpoint(
    first: Callable[..., Tensor], again: Callable[..., Tensor], *tensors: Tensor, spread: ProcessGroup | None = None
) -> Tensor:
    """`first(*tensors)`, of which the backward runs `again(*tensors)` and differentiates that.

    Both are the same function of the tensors and of parameters, but for what they record. Without gradients enabled
    nothing is kept and nothing runs twice. `spread`: ranks that all hold the same tensors, of which each keeps a part;
    None: this one keeps them whole.
    """
    if not torch.is_grad_enabled():
        return first(*tensors)
    # Parameters inside need gradients also where no input has one.
    anchor = tensors[0].new_empty(0).requires_grad_()
    out: Tensor = _Checkpoint.apply(anchor, first, again, spread, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        first: Callable[..., Tensor],
        again: Callable[..., Tensor],
        spread: ProcessGroup | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.again, ctx.spread = again, spread
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.save_for_backward(*(_own_part(tensor, spread) for tensor in tensors))
        return first(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        whole = [_whole(kept, shape, ctx.spread) for kept, shape in zip(ctx.saved_tensors, ctx.shapes, strict=True)]
        inputs = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(whole, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.again(*inputs)
        # Not `autograd.grad`: gradients of parameters are left where every backward leaves them.
        torch.autograd.backward(out, grads[0])
        return None, None, None, None, *(tensor.grad for tensor in inputs)


def _own_part(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the elements, in memory of its own."""
    if group is None:
        return tensor
    number = tensor.numel()
    assert number % group.size == 0, f"{number} elements do not divide among {group.size} ranks"
    return tensor.detach().flatten().chunk(group.size)[group.rank].clone()


def _whole(kept: Tensor, shape: torch.Size, group: ProcessGroup | None) -> Tensor:
    """The inverse of `_own_part`."""
    if group is None:
        return kept
    # tp: all-gather of the elements of one hidden state; no gradient flows through it
    whole = kept.new_empty(shape.numel())
    all_gather_flat(whole, kept, group)
    return whole.view(shape)
