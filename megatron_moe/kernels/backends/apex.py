"""Ops of NVIDIA Apex, built from source with its CUDA extensions: fused weight gradients and fused norms.

The package `apex` on PyPI is an unrelated project without these modules.
"""

import fused_weight_gradient_mlp_cuda
import torch
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from torch import Tensor

from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.reference import backend as reference

NAME = "apex"
NEEDS = ("apex", "fused_weight_gradient_mlp_cuda", "fused_layer_norm_cuda")
ON_REQUEST = True


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if device.type != "cuda":
        return Support(Priority.NO, "it runs on NVIDIA GPUs only")
    if dtype is torch.float64:
        return Support(Priority.NO, "fp64 is used for verification only and runs on plain torch")
    if op == "linear_weight_grad":
        return Support(Priority.YES, "accumulates inside the gradient buffer")
    return Support(Priority.YES, "Apex kernel")


def linear_weight_grad(grad: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """See `Kernels.linear_weight_grad`. `out` must be fp32 or have the dtype of `grad` and `x`."""
    grads, rows = grad.flatten(0, -2).contiguous(), x.flatten(0, -2).contiguous()
    if not accumulate:
        out.zero_()
    if rows.shape[0] == 0:
        return
    if out.dtype is torch.float32:
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, grads, out)
    else:
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(rows, grads, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if x.numel() == 0:
        return reference.rms_norm(x, weight, eps, zero_centered)
    return fused_rms_norm_affine(x, _scale(weight, zero_centered), weight.shape, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if x.numel() == 0:
        return reference.layer_norm(x, weight, bias, eps, zero_centered)
    return fused_layer_norm_affine(x, _scale(weight, zero_centered), bias, weight.shape, eps)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight + 1.0 if zero_centered else weight
