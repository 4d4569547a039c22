"""Fakes of torch's own kernels: they allocate what the kernels allocate on a GPU and compute nothing.

`tests/memory_emulation/test_kernels.py` compares sizes with those measured on a GPU.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.torch_native.backend import bf16_parts
from megatron_moe.kernels.ops import internal_dtype


def linear_weight_grad(grad: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Accumulates in place."""
    grad.flatten(0, -2)
    x.flatten(0, -2)


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    grad_RO = grad.contiguous()
    return grad_RO.new_empty(grad_RO.shape[0], weight.shape[2])


def gate_product(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    if not hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 or dtype is not torch.float32:
        return reference.gate_product(hidden_TH, weight_EH, dtype)
    return _GateProduct.apply(hidden_TH, weight_EH)  # type: ignore[no-untyped-call,no-any-return]


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        return hidden_TH.new_empty(hidden_TH.shape[0], weight_EH.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_EH = ctx.saved_tensors
        parts_T3E = bf16_parts(grads[0])
        grad_hidden_TH = parts_T3E @ weight_EH.repeat(3, 1)
        grad_3EH = hidden_TH.new_empty(3, *weight_EH.shape, dtype=torch.float32)
        return grad_hidden_TH, grad_3EH.sum(dim=0).to(weight_EH.dtype)


def sum_of_squares(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=internal_dtype(flat.dtype))


def cudnn_forward(q_SBND: Tensor, v_SBGE: Tensor) -> tuple[Tensor, ...]:
    """Output, log-sum-exp [B, N, S], and seed and offset of a dropout."""
    seq, batch, heads, _ = q_SBND.shape
    out_SBNE = q_SBND.new_empty(seq, batch, heads, v_SBGE.shape[-1])
    lse_BNS = q_SBND.new_empty(batch, heads, seq, dtype=torch.float32)
    return out_SBNE, lse_BNS, *(q_SBND.new_empty((), dtype=torch.int64) for _ in range(2))


def cudnn_backward(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v. cuDNN's workspace, as measured: the queries' gradients in fp32, and those of keys and
    values by head, where several heads share them."""
    grads = tuple(x.new_empty(x.shape) for x in (q_SBND, k_SBGD, v_SBGE))
    wide_q = q_SBND.new_empty(q_SBND.shape, dtype=torch.float32)
    heads = q_SBND.shape[2]
    by_head = [x.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (k_SBGD, v_SBGE) if x.shape[2] < heads]
    del wide_q, by_head
    return grads


FAKES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (linear_weight_grad, grouped_forward, grouped_input_grad, gate_product, sum_of_squares)
    }
)
"""Ops that are not torch's code itself on the emulated tensors."""
