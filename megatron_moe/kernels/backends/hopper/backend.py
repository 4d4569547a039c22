"""Grouped GEMMs, bf16 and FP8, and FP8 casts for GPUs of compute capability 9 (H100, H200), in Gluon.

Unlike in Triton, the kernel code determines which warps load data, which warps compute, and when results are stored.
Each op is one launch. Row offsets stay on the device. Results are bitwise reproducible, because every sum has a fixed
order. Gluon has no interpreter: CPU tests only compile the kernels, GPU tests compare results.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from megatron_moe.kernels.backends.hopper import weight_grad
from megatron_moe.kernels.backends.hopper.casts import quantize_activation_grad, quantize_permuted, quantize_rows
from megatron_moe.kernels.backends.hopper.fp8_grouped_gemm import (
    quantized_grouped_forward,
    quantized_grouped_input_grad,
)
from megatron_moe.kernels.backends.hopper.fp8_linear import (
    quantized_linear_forward,
    quantized_linear_input_grad,
    quantized_linear_weight_grad,
)
from megatron_moe.kernels.backends.hopper.fp8_weight_grad import quantized_grouped_weight_grad
from megatron_moe.kernels.backends.hopper.grouped_gemm import grouped_forward, grouped_input_grad
from megatron_moe.kernels.backends.triton import experts
from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.ops import GroupedPart

NAME = "hopper"
NEEDS = ("triton", "triton.experimental.gluon.nvidia.hopper")
DEVICES = ("cuda",)
RECIPES = ("blockwise e4m3", "blockwise hybrid")
GLUON = "3.6"
"""Triton version that the kernels require; other versions lack some of the Gluon operations used here
(docs/kernels.md)."""


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if dtype is not torch.bfloat16:
        return Support(Priority.NO, "it supports bf16 only")
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return Support(Priority.NO, "it requires compute capability 9 (H100, H200)")
    if not triton.__version__.startswith(f"{GLUON}."):
        return Support(Priority.NO, f"it requires the Gluon of Triton {GLUON}; installed is {triton.__version__}")
    reason = "TMA and warpgroup MMA; offsets stay on the device"
    if op.startswith("quantize_"):
        reason = "reads each tile once for the rowwise and the columnwise copy"
    if op.startswith("quantized_linear"):
        reason = "cuBLAS if it supports the sizes, otherwise TMA and warpgroup MMA"
    if op.endswith("grouped_weight_grad"):
        reason += "; accumulates in fp32 in the gradient buffer"
    return Support(Priority.TAILORED, reason)


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. bf16 gradient buffers use the Triton kernel, because the Hopper kernel would
    round the sum in the buffer once per launch, that is, every two microbatches."""
    if out.dtype is torch.float32:
        weight_grad.grouped_weight_grad(parts, out, accumulate)
    else:
        experts.grouped_weight_grad(parts, out, accumulate)
