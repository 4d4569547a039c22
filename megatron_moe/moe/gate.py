"""From hidden states to the router's logits: input jitter, the gate's matrix product, forced logits for benchmarks."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, Operand, internal_dtype
from megatron_moe.parallel import rng
from megatron_moe.parallel.rng import Key
from megatron_moe.specs.params import Part


def gate_product(
    kernels: Kernels, hidden_SBH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """hidden [S, B, H] times weight [E, H] transposed, plus bias [E] -> logits [T, E] in `dtype`, t = s * B + b.

    Forward and backward multiply in `dtype`; only the unconverted hidden states and weight are kept for the backward.
    """
    return _GateProduct.apply(kernels, hidden_SBH.flatten(0, 1), weight_EH, bias_E, dtype)  # type: ignore[no-untyped-call,no-any-return]


def jitter(hidden_SBH: Tensor, eps: float, key: Key, part: Part = (0, 1)) -> Tensor:
    """Multiplies every element by a number drawn from U(1 - eps, 1 + eps) (Switch Transformer, arXiv 2101.03961).

    The positions are `part` (index, number) of a longer sequence, for which the numbers are drawn.
    """
    uniform = rng.uniform(hidden_SBH.shape, key, hidden_SBH.device, part=part)
    return hidden_SBH * (1 + eps * (2 * uniform - 1)).to(hidden_SBH.dtype)


def forced_logits(
    logits_TE: Tensor, noise_key: Key, bias_std: float | None, bias_key: Key, part: Part = (0, 1)
) -> Tensor:
    """Replaces the logits by N(0, 1) noise, for benchmarks with a load that the weights do not decide.

    With `bias_std`, an N(0, bias_std) number per expert is added, so that the load is uneven in a known measure. The
    gradient of the noise passes straight through to the logits: the gate stays part of the backward. The tokens are
    `part` (index, number) of more tokens, for which the noise is drawn.
    """
    noise_TE = _normal(logits_TE.shape, noise_key, logits_TE, part)
    if bias_std is not None:
        noise_TE = noise_TE + bias_std * _normal(logits_TE.shape[-1:], bias_key, logits_TE)
    return _StraightThrough.apply(logits_TE, noise_TE)  # type: ignore[no-untyped-call,no-any-return]


def _normal(shape: torch.Size, key: Key, like: Tensor, part: Part = (0, 1)) -> Tensor:
    """Drawn in single precision, so that a double precision run sees the same numbers."""
    return rng.normal(shape, key, like.device, part=part).to(like.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, replacement_TE: Tensor) -> Tensor:
        return replacement_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, hidden_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.kernels, ctx.dtype = kernels, dtype
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        ctx.save_for_backward(hidden_TH, weight_EH)
        bias = None if bias_E is None else bias_E.to(dtype)
        return kernels.linear_forward(Operand(data=hidden_TH.to(dtype)), Operand(data=weight_EH.to(dtype)), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = Operand(data=grads[0])
        hidden_TH, weight_EH = ctx.saved_tensors
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_hidden = ctx.kernels.linear_input_grad(grad, Operand(data=weight_EH.to(ctx.dtype))).to(hidden_TH.dtype)
        if ctx.needs_input_grad[2]:
            wide = torch.empty_like(weight_EH, dtype=ctx.dtype)
            ctx.kernels.linear_weight_grad(grad, Operand(data=hidden_TH.to(ctx.dtype)), wide, False)
            grad_weight = wide.to(weight_EH.dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = grads[0].sum(dim=0, dtype=internal_dtype(ctx.dtype)).to(ctx.bias_dtype)
        return None, grad_hidden, grad_weight, grad_bias, None
