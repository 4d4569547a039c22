"""Grouped products for GPUs of compute capability 9 (H100, H200), in Gluon: TMA, warpgroup products, one launch each.

Gluon, unlike Triton, controls which warps load, which multiply and when results are stored. Offsets stay on the device,
and every sum has a fixed order: results are bitwise reproducible. Gluon has no interpreter: CPU tests compile the
kernels, GPU tests compare results.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from megatron_moe.kernels.backends.hopper import weight_grad
from megatron_moe.kernels.backends.hopper.product import grouped_forward as grouped_forward
from megatron_moe.kernels.backends.hopper.product import grouped_input_grad as grouped_input_grad
from megatron_moe.kernels.backends.triton import experts
from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.ops import GroupedPart

NAME = "hopper"
NEEDS = ("triton", "triton.experimental.gluon.nvidia.hopper")
PROVIDES = ("grouped_forward", "grouped_input_grad", "grouped_weight_grad")
GLUON = "3.6"
"""Triton whose Gluon they are written in: other versions lack some of its operations (docs/kernels.md)."""


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """See `megatron_moe.kernels.registry`."""
    if dtype is not torch.bfloat16:
        return Support(Priority.NO, "it multiplies bf16")
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return Support(Priority.NO, "it is written for compute capability 9 (H100, H200)")
    if not triton.__version__.startswith(f"{GLUON}."):
        return Support(Priority.NO, f"it is written in the Gluon of Triton {GLUON}, and here is {triton.__version__}")
    reason = "TMA and warpgroups; offsets stay on the device"
    if op == "grouped_weight_grad":
        reason += "; added in fp32 inside the gradient buffer"
    return Support(Priority.TAILORED, reason)


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. Gradient buffers in bf16 are left to the Triton kernel: sums in memory would
    round every time."""
    if out.dtype is torch.float32:
        weight_grad.grouped_weight_grad(parts, out, accumulate)
    else:
        experts.grouped_weight_grad(parts, out, accumulate)
