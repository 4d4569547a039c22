"""Parts of the forward that run twice: first without a graph, and again in the backward, where they are differentiated.

Between the two only the inputs are kept. Random draws are keyed by what they are for (`parallel/rng.py`), so the second
forward draws the numbers of the first; metrics are recorded in the first, and what enters the gradient or is counted
for the update of the routers belongs to the second (docs/decisions/0104). Weight gradients arise in the second alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_twice(first: Callable[..., Tensor], again: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`first(*tensors)`, of which the backward runs `again(*tensors)` and differentiates that.

    Both are the same function of the tensors and of parameters, but for what they record. Without gradients enabled
    nothing is kept and nothing runs twice.
    """
    if not torch.is_grad_enabled():
        return first(*tensors)
    # Parameters inside need gradients also where no input has one.
    anchor = tensors[0].new_empty(0).requires_grad_()
    out: Tensor = _RunTwice.apply(anchor, first, again, *tensors)  # type: ignore[no-untyped-call]
    return out


class _RunTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, first: Callable[..., Tensor], again: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        return first(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        inputs = [
            tensor.detach().requires_grad_(needed) for tensor, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.again(*inputs)
        # Not `autograd.grad`: gradients of parameters are left where every backward leaves them.
        torch.autograd.backward(out, grads[0])
        return None, None, None, *(tensor.grad for tensor in inputs)
