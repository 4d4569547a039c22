"""GEMMs of dense layers with block-scaled FP8 operands.

cuBLAS computes them through torch (1261 TFLOP/s on an H200, the grouped kernel for one group 1104) where its layout of
scales, padded to multiples of four, equals that of this project; the grouped kernels compute other sizes, E5M2 and
weight gradients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.backends.hopper.fp8_grouped_gemm import multiply
from megatron_moe.kernels.backends.hopper.fp8_weight_grad import quantized_grouped_weight_grad
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor

_WEIGHT, _ROWS = 16, 4
"""Numbers of which cuBLAS requires multiples: for both weight dims, and for the number of rows."""


def quantized_linear_forward(x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """See `Kernels.linear_forward`."""
    out = _fp8_gemm(x, weight.row_copy)
    return out if bias is None else out + bias


def quantized_linear_input_grad(grad: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """See `Kernels.linear_input_grad`."""
    return _fp8_gemm(grad, weight.column_copy)


def quantized_linear_weight_grad(grad: QuantizedTensor, x: QuantizedTensor, out: Tensor, accumulate: bool) -> None:
    """See `Kernels.linear_weight_grad`."""
    part = GroupedPart[MatrixOperand](grad, x, _one_group(grad.column_copy.data.shape[1], out.device))
    quantized_grouped_weight_grad([part], out[None], accumulate)


def _fp8_gemm(x: QuantizedTensor, weight: QuantizedCopy) -> Tensor:
    """GEMM of x [R, D] in blocks of 1x128 and a transposed weight [C, D] in blocks of 128x128 -> bf16 [R, C]."""
    data, scales, _ = x.row_copy
    e4m3 = data.dtype == weight.data.dtype == torch.float8_e4m3fn
    if not e4m3 or len(data) % _ROWS or any(size % _WEIGHT for size in weight.data.shape) or not data.numel():
        stack = QuantizedCopy(weight.data[None], weight.scales[None])
        return multiply(x, stack, _one_group(len(data), data.device))
    padding = -weight.scales.shape[1] % 4
    weight_scales = F.pad(weight.scales, (0, padding)) if padding else weight.scales
    # stored weights share one tensor of scales, so those of a weight may be unaligned
    if weight_scales.data_ptr() % 16:
        weight_scales = weight_scales.clone()
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(data, weight.data.T, scales.T, kinds[0], weight_scales.T, kinds[1], output_dtype=torch.bfloat16)


def _one_group(num_rows: int, device: torch.device) -> Tensor:
    """Offsets that make a grouped kernel process all rows as one group."""
    return torch.full((1,), num_rows, device=device, dtype=torch.int32)
