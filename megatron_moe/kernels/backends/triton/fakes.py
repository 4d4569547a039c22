"""Fakes of the Triton kernels, importable without Triton.

A fake allocates what the kernel's wrapper allocates on a Hopper GPU, saves the same tensors for backward, and computes
nothing: values are those of uninitialised memory. `tests/memory_emulation/test_kernels.py` compares every fake with its
wrapper.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.moe import ActivationConfig
from megatron_moe.kernels.backends.triton import fake_attention, fake_routing
from megatron_moe.kernels.backends.triton.sizes import EMBEDDING_ROWS, HOPPER_MULTIPROCESSORS, norm_programs, rows_of
from megatron_moe.kernels.low_precision_state import PackedState
from megatron_moe.kernels.ops import AdamWStep, GroupedPart

# matrix products


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """Accumulates in place; factors whose rows have gaps are copied, all of them before the product begins."""
    factors = [factor for part in parts for factor in (part.grad, part.rows)]
    factors += [each.contiguous() for each in factors if each.stride(-1) != 1]


def embedding_grad(grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
    rows_of(grad_TH)
    sorted_T, order_T = torch.sort(ids_T.to(torch.int32), stable=True)
    parts = grad_TH.new_empty(-(-ids_T.numel() // EMBEDDING_ROWS), 2, grad_TH.shape[-1], dtype=torch.float32)
    del sorted_T, order_T, parts


# norms, positions, attention


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call,no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_RH = rows_of(x)
        out_RH, scale_R = _normed(x_RH)
        ctx.save_for_backward(x_RH, weight, scale_R)
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_RH, grad_weight = _norm_backward(grads[0], *ctx.saved_tensors[:2])
        return grad_x_RH.view(grads[0].shape), grad_weight


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    total, normed = _AddRMSNorm.apply(residual, x, weight)  # type: ignore[no-untyped-call]
    return total, normed


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x_RH = rows_of(x)
        rows_of(residual)
        total_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        out_RH, scale_R = _normed(x_RH)
        ctx.save_for_backward(total_RH, weight, scale_R)
        ctx.set_materialize_grads(False)
        return total_RH.view(x.shape), out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_out = grads
        if grad_out is None:
            return grad_total, grad_total, None
        grad_RH, grad_weight = _norm_backward(grad_out, *ctx.saved_tensors[:2])
        grad = grad_RH.view(grad_out.shape)
        return grad, grad, grad_weight


def _normed(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    return out_RH, torch.empty(x_RH.shape[0], device=x_RH.device, dtype=torch.float32)


def _norm_backward(grad: Tensor, x_RH: Tensor, weight: Tensor, weights: int = 1) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradients of all its weights side by side)"""
    rows_of(grad)
    num_rows, width = x_RH.shape
    grad_x_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    num_programs = norm_programs(num_rows, width, HOPPER_MULTIPROCESSORS)
    shares_PW = torch.empty(num_programs, weights * width, device=x_RH.device, dtype=torch.float32)
    return grad_x_RH, shares_PW.new_empty(weights * width, dtype=weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _LayerNorm.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x_RH = rows_of(x)
        out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        moments_2R = torch.empty(2, x_RH.shape[0], device=x_RH.device, dtype=torch.float32)
        ctx.save_for_backward(x_RH, weight, moments_2R)
        ctx.bias_dtype = bias.dtype
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight, _ = ctx.saved_tensors
        grad_x_RH, both = _norm_backward(grads[0], x_RH, weight, weights=2)
        grad_weight, grad_bias = both.chunk(2)
        return grad_x_RH.view(grads[0].shape), grad_weight, grad_bias.to(ctx.bias_dtype)


# elementwise and loss


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    return _Activation.apply(x_RF, probs_R, config)  # type: ignore[no-untyped-call,no-any-return]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, config: ActivationConfig) -> Tensor:
        x_RF, probs_R = rows_of(x), None if probs is None else probs.reshape(-1).contiguous()
        width = x_RF.shape[1] // config.fan
        ctx.save_for_backward(x_RF, probs_R)
        return x_RF.new_empty(x_RF.shape[0], width).view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, probs_R = ctx.saved_tensors
        rows_of(grads[0])
        shape = grads[0].shape[:-1]
        grad_x = torch.empty_like(x_RF, memory_format=torch.contiguous_format).view(*shape, x_RF.shape[1])
        return grad_x, None if probs_R is None else torch.zeros_like(probs_R).view(shape), None


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return _CrossEntropy.apply(logits_TV, labels_T)  # type: ignore[no-untyped-call,no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = rows_of(logits)
        loss_T = torch.empty(logits_TV.shape[0], device=logits.device, dtype=torch.float32)
        ctx.save_for_backward(logits_TV, labels_T, torch.empty_like(loss_T))
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, *_ = ctx.saved_tensors
        return torch.empty_like(logits_TV, memory_format=torch.contiguous_format), None


# optimizer


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, move: AdamWStep, weights: Tensor | None = None
) -> None:
    """In place."""


def adamw_packed_(
    master: PackedState,
    grad: Tensor,
    exp_avg: PackedState,
    exp_avg_sq: PackedState,
    move: AdamWStep,
    weights: Tensor | None = None,
    first: int = 0,
) -> None:
    """In place."""


FAKES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            grouped_weight_grad,
            embedding_grad,
            rms_norm,
            add_rms_norm,
            layer_norm,
            fake_attention.rope,
            fake_attention.query_key_value,
            fake_attention.latent_key_value,
            fake_attention.attention,
            fake_attention.attention_block,
            fake_attention.attention_block_grad,
            activation,
            cross_entropy,
            fake_routing.gate_product,
            fake_routing.route,
            fake_routing.count_tokens,
            fake_routing.sort_rows,
            fake_routing.permute,
            fake_routing.unpermute,
            fake_routing.gather_probs,
            fake_routing.pack_rows,
            fake_routing.unpack_rows,
            fake_routing.free_pages,
            adamw_,
            adamw_packed_,
        )
    }
)
