"""AdamW over flat buffers (Loshchilov and Hutter, arXiv 1711.05101) in one pass that writes the rounded weights too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def adamw_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    proceed: Tensor,
    weights: Tensor | None = None,
) -> None:
    """See `Kernels.adamw_`. The gradient keeps its bits."""
    corrections = _corrections((beta1, beta2), step)
    if master.numel():
        _adamw[(triton.cdiv(master.numel(), BLOCK),)](
            master, grad, exp_avg, exp_avg_sq, master if weights is None else weights, corrections, grad_scale,
            proceed.to(torch.int32), master.numel(), lr, beta1, beta2, eps, weight_decay,
            ROUNDED=weights is not None, BLOCK=BLOCK,
        )  # fmt: skip


def _corrections(betas: tuple[float, float], step: Tensor) -> Tensor:
    """1 - beta^step of both, fp32 [2] on the device, computed in fp64: near 1 a power in fp32 has few digits."""
    return torch.stack([1 - torch.pow(beta, step.double()) for beta in betas]).to(torch.float32)


@triton.jit
def _adamw(
    master_ptr, grad_ptr, first_ptr, second_ptr, weights_ptr, corrections_ptr, scale_ptr, proceed_ptr, num,
    lr, beta1, beta2, eps, weight_decay, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(proceed_ptr) != 0:
        each = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        held = each < num
        scale = tl.load(scale_ptr).to(tl.float32)
        correction1, correction2 = tl.load(corrections_ptr), tl.load(corrections_ptr + 1)
        grad = tl.load(grad_ptr + each, mask=held, other=0.0).to(tl.float32) * scale
        first = tl.load(first_ptr + each, mask=held, other=0.0).to(tl.float32)
        second = tl.load(second_ptr + each, mask=held, other=0.0).to(tl.float32)
        master = tl.load(master_ptr + each, mask=held, other=0.0).to(tl.float32)
        first = beta1 * first + (1.0 - beta1) * grad
        second = beta2 * second + (1.0 - beta2) * grad * grad
        update = first / correction1 / (tl.sqrt(second / correction2) + eps)
        master = master * (1.0 - lr * weight_decay) - lr * update
        tl.store(first_ptr + each, first.to(first_ptr.dtype.element_ty), mask=held)
        tl.store(second_ptr + each, second.to(second_ptr.dtype.element_ty), mask=held)
        tl.store(master_ptr + each, master.to(master_ptr.dtype.element_ty), mask=held)
        if ROUNDED:
            tl.store(weights_ptr + each, master.to(weights_ptr.dtype.element_ty), mask=held)
