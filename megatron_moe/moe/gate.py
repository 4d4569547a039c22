"""From hidden states to the router's logits: input jitter, the gate's matrix product, forced logits for benchmarks."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel import rng
from megatron_moe.parallel.param_meta import Part
from megatron_moe.parallel.rng import Key


def gate_product(
    kernels: Kernels, hidden_SBH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """hidden [S, B, H] times weight [E, H] transposed, plus bias [E] -> logits [T, E] in `dtype`, t = s * B + b.

    Forward and backward multiply in `dtype`; only the unconverted hidden states and weight are kept for the backward.
    """
    logits_TE = kernels.gate_product(hidden_SBH.flatten(0, 1), weight_EH, dtype)
    return logits_TE if bias_E is None else logits_TE + bias_E.to(dtype)


def jitter(hidden_SBH: Tensor, eps: float, key: Key, part: Part = (0, 1)) -> Tensor:
    """Multiplies every element by a number drawn from U(1 - eps, 1 + eps) (Switch Transformer, arXiv 2101.03961).

    The positions are `part` (index, number) of a longer sequence, for which the numbers are drawn.
    """
    uniform = rng.uniform(hidden_SBH.shape, key, hidden_SBH.device, part=part)
    return hidden_SBH * (1 + eps * (2 * uniform - 1)).to(hidden_SBH.dtype)


def draw_logits(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    noise_key: Key,
    bias_std: float | None,
    bias_key: Key,
    part: Part = (0, 1),
) -> Tensor:
    """N(0, 1) noise [T, E], for benchmarks with a load that the weights do not decide.

    With `bias_std`, an N(0, bias_std) number per expert is added, so that the load is uneven in a known measure. The
    tokens are `part` (index, number) of more tokens, for which the noise is drawn. Drawn in single precision, so that a
    double precision run sees the same numbers.
    """
    # a copy: a part of the noise would keep all of it in memory until the backward
    noise_TE = rng.normal(torch.Size(shape), noise_key, device, part=part).to(dtype, copy=part[1] > 1)
    if bias_std is None:
        return noise_TE
    return noise_TE + bias_std * rng.normal(torch.Size(shape[1:]), bias_key, device).to(dtype)


def force_logits(logits_TE: Tensor, drawn_TE: Tensor) -> Tensor:
    """Drawn logits in the place of the router's own. Their gradient passes straight through to the logits: the gate
    stays part of the backward."""
    return _StraightThrough.apply(logits_TE, drawn_TE)  # type: ignore[no-untyped-call,no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, replacement_TE: Tensor) -> Tensor:
        return replacement_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None
