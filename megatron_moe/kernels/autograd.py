"""Matrix products with our own backward: weight gradients go to the parameter's sink, saved tensors to a policy."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.ops import GroupedPart, Kernels, Operand, internal_dtype
from megatron_moe.parallel.parameter import BatchedWeightGrad, GradAccumulator


class SavedForBackward(NamedTuple):
    """A tensor as it waits for the backward: what is kept of it, and how it is made whole again."""

    tensors: tuple[Tensor, ...]
    restore: Callable[..., Tensor]


class Saver(Protocol):
    """Decides by name what is kept of a tensor between forward and backward: all of it, a quantised or compacted copy,
    a copy on the host."""

    def __call__(self, name: str, tensor: Tensor, valid_rows: Tensor | None = None) -> SavedForBackward:
        """`valid_rows`: int32 scalar on the device; rows past it hold nothing and need not be kept."""
        ...


def keep(name: str, tensor: Tensor, valid_rows: Tensor | None = None) -> SavedForBackward:
    """The default policy: keeps the tensor."""
    return SavedForBackward((tensor,), lambda kept: kept)


def linear(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    saver: Saver = keep,
    name: str = "linear.input",
) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O] -> [..., O].

    The weight's gradient goes to `weight.sink` if the parameter has one, else to autograd.
    """
    out: Tensor = _Linear.apply(kernels, x, weight, bias, saver, name)  # type: ignore[no-untyped-call]
    return out


def grouped_linear(
    kernels: Kernels,
    rows: Tensor | Operand,
    weight: Tensor,
    offsets_e: Tensor,
    *,
    saver: Saver = keep,
    name: str = "grouped_linear.input",
) -> Tensor:
    """rows [R, I] sorted by expert, each times its expert's matrix of weight [e, O, I] -> [R, O].

    Rows past `offsets_e[-1]` are undefined in the result, and in the gradient of `rows`.
    """
    data = rows.plain() if isinstance(rows, Operand) else rows
    out: Tensor = _GroupedLinear.apply(kernels, data, weight, offsets_e, saver, name)  # type: ignore[no-untyped-call]
    return out


def embedding(kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `ids` int64 [...] of weight [V, H] -> [..., H]. The weight's gradient goes where that of `linear` goes."""
    out: Tensor = _Embedding.apply(kernels, ids, weight)  # type: ignore[no-untyped-call]
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.kernels, ctx.weight = kernels, weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), kernels = ctx.saved_tensors, ctx.kernels
        ids_T, grad_TH = ids.flatten(), grads[0].flatten(0, -2)

        def compute(out: Tensor, accumulate: bool) -> None:
            kernels.embedding_grad(grad_TH, ids_T, out, accumulate)

        return None, None, give(ctx.weight, compute) if ctx.needs_input_grad[2] else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, saver: Saver, name: str
    ) -> Tensor:
        saved = saver(name, x)
        ctx.kernels, ctx.weight, ctx.restore = kernels, weight, saved.restore
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*saved.tensors)
        return kernels.linear_forward(Operand(data=x), Operand(data=weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        kernels, weight = ctx.kernels, ctx.weight
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_x = kernels.linear_input_grad(Operand(data=grad), Operand(data=weight))
        if ctx.needs_input_grad[2]:
            x = ctx.restore(*ctx.saved_tensors)

            def compute(out: Tensor, accumulate: bool) -> None:
                kernels.linear_weight_grad(Operand(data=grad), Operand(data=x), out, accumulate)

            grad_weight = give(weight, compute)
        if ctx.needs_input_grad[3]:
            wide = internal_dtype(grad.dtype)
            grad_bias = grad.flatten(0, -2).sum(dim=0, dtype=wide).to(ctx.bias_dtype)
        return None, grad_x, grad_weight, grad_bias, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, rows: Tensor, weight: Tensor, offsets_e: Tensor, saver: Saver, name: str
    ) -> Tensor:
        saved = saver(name, rows, offsets_e[-1])
        ctx.kernels, ctx.weight, ctx.restore = kernels, weight, saved.restore
        ctx.save_for_backward(offsets_e, *saved.tensors)
        return kernels.grouped_forward(Operand(data=rows), Operand(data=weight), offsets_e)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        kernels, weight = ctx.kernels, ctx.weight
        offsets_e, *kept = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_rows = kernels.grouped_input_grad(Operand(data=grad), Operand(data=weight), offsets_e)
        if ctx.needs_input_grad[2]:
            # a part may outlive this backward, and must not keep the graph that the rows came from
            rows = ctx.restore(*kept).detach()
            part = GroupedPart(Operand(data=grad), Operand(data=rows), offsets_e)
            grad_weight = give(weight, BatchedWeightGrad(kernels.grouped_weight_grad, (part,)))
        return None, grad_rows, grad_weight, None, None, None


def give(weight: Tensor, compute: Callable[[Tensor, bool], None]) -> Tensor | None:
    """Hands the computation of a weight gradient to the weight's sink; without one, computes it for autograd."""
    sink: GradAccumulator | None = getattr(weight, "sink", None)
    if sink is not None:
        sink.add(compute)
        return None
    grad = torch.empty_like(weight)
    compute(grad, False)
    return grad
