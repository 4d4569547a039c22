"""Grouped GEMMs of the package grouped-gemm (tgale96/grouped_gemm, CUTLASS or cuBLAS), in bf16.

Each GEMM synchronises with the device to read the number of rows per expert. `auto` never selects this backend.
"""

from collections.abc import Sequence

import torch
from grouped_gemm import backend
from torch import Tensor

from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.ops import GroupedPart
from megatron_moe.kernels.reference import backend as reference

NAME = "grouped_gemm"
NEEDS = ("grouped_gemm",)
ON_REQUEST = True


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if device.type != "cuda":
        return Support(Priority.NO, "it runs on NVIDIA GPUs only")
    if dtype is not torch.bfloat16:
        return Support(Priority.NO, "it computes in bfloat16 only")
    return Support(Priority.YES, "the host synchronises to read the number of rows per expert")


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_gemm(rows, weight, offsets_e, trans_b=True)


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_gemm(grad, weight, offsets_e, trans_b=False)


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. The package returns bf16, so the result is rounded to bf16 before it is added
    to `out`."""
    for part, adds in reference.with_accumulate(parts, accumulate):
        _weight_grad(*part, out, adds)


def _weight_grad(grad: Tensor, rows: Tensor, offsets_e: Tensor, out: Tensor, accumulate: bool) -> None:
    sizes_e = _sizes(offsets_e)
    held = int(sizes_e.sum())
    a, b = (x[:held].contiguous() for x in (grad, rows))
    weight_grad = backend.gmm(a, b, sizes_e, trans_a=True, trans_b=False) if held else out.new_zeros(out.shape)
    # the package leaves the weight gradient of experts without rows undefined
    empty_e = (sizes_e == 0).to(out.device)[:, None, None]
    reference.store(weight_grad.to(out.dtype).masked_fill(empty_e, 0), out, accumulate)


def _grouped_gemm(rows: Tensor, weight: Tensor, offsets_e: Tensor, *, trans_b: bool) -> Tensor:
    """Grouped GEMM of rows and expert weights; rows beyond `offsets_e[-1]` are 0 in the result."""
    sizes_e = _sizes(offsets_e)
    held = int(sizes_e.sum())
    out = rows.new_zeros(rows.shape[0], weight.shape[1 if trans_b else 2])
    if held:
        out[:held] = backend.gmm(rows[:held].contiguous(), weight, sizes_e, trans_a=False, trans_b=trans_b)
    return out


def _sizes(offsets_e: Tensor) -> Tensor:
    """Number of rows per expert, int64 on the host. Synchronises with the device."""
    return offsets_e.diff(prepend=offsets_e.new_zeros(1)).to("cpu", torch.int64)
