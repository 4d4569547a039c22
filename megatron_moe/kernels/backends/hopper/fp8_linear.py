"""Linear layers with block-scaled FP8 operands: torch's `scaled_mm` where cuBLAS supports the shape, else the grouped
product with one group."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.backends.hopper import fp8_product, fp8_weight_grad
from megatron_moe.kernels.ops import GroupedPart, QuantizedTensor


def linear_forward(x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """See `Kernels.linear_forward`; bf16 results. Reads the rowwise copies of both operands."""
    out = _multiply(x, *weight.row_copy[:2])
    return out if bias is None else out + bias


def linear_input_grad(grad: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """See `Kernels.linear_input_grad`; bf16 results. Reads the rowwise gradient and the columnwise weight."""
    return _multiply(grad, *weight.column_copy[:2])


def linear_weight_grad(grad: QuantizedTensor, x: QuantizedTensor, out: Tensor, accumulate: bool) -> None:
    """See `Kernels.linear_weight_grad`. Reads the columnwise copies of both operands."""
    num_rows = x.column_copy.data.shape[1]
    ends = torch.full((1,), num_rows, device=out.device, dtype=torch.int32)
    grouped_weight_grad([GroupedPart[QuantizedTensor](grad, x, ends)], out[None], accumulate)


def grouped_weight_grad(parts: Sequence[GroupedPart[QuantizedTensor]], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. The kernel writes fp32; the sums are rounded once if `out` is bf16."""
    if out.dtype == torch.float32:
        fp8_weight_grad.grouped_weight_grad(parts, out, accumulate)
        return
    wide = out.float() if accumulate else torch.empty_like(out, dtype=torch.float32)
    fp8_weight_grad.grouped_weight_grad(parts, wide, accumulate)
    out.copy_(wide)


def _multiply(rows: QuantizedTensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Multiplies rows [R, D] by the transpose of a weight [C, D] -> [R, C]."""
    data, scales = rows.row_copy[:2]
    (num_rows, depth), columns = data.shape, weight.shape[0]
    if not num_rows or num_rows % 4 or depth % 16 or columns % 16:
        ends = torch.full((1,), num_rows, device=data.device, dtype=torch.int32)
        return fp8_product.multiply(rows, weight[None], weight_scales[None], ends)
    # cuBLAS reads scales of weights in rows of a multiple of 4
    padded = F.pad(weight_scales, (0, -weight_scales.shape[1] % 4)) if weight_scales.shape[1] % 4 else weight_scales
    per_row, per_block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(data, weight.T, scales.T, per_row, padded.T, per_block, output_dtype=torch.bfloat16)
