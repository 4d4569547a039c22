"""Expert weight gradients of block-scaled FP8 operands, computed in bf16.

Reads the columnwise (transposed) copies, whose scales belong to blocks of 128 rows (tokens). An E4M3 or E5M2 element
times a power of two is a bf16 number, so the operands are dequantised exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.kernels.backends.hopper import weight_grad
from megatron_moe.kernels.backends.triton import experts
from megatron_moe.kernels.backends.triton.quantize import dequantize_columns
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.precision.quantized_tensor import QuantizedTensor

BLOCK = 128
"""Rows per scale. The rows of an expert are padded to a multiple."""


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`."""
    in_bf16 = weight_grad if out.dtype is torch.float32 else experts
    in_bf16.grouped_weight_grad([_dequantized(part) for part in parts], out, accumulate)


def _dequantized(part: GroupedPart[MatrixOperand]) -> GroupedPart[Tensor]:
    """The part in bf16, with the gaps between experts as rows of 0."""
    assert isinstance(part.grad, QuantizedTensor) and isinstance(part.rows, QuantizedTensor)
    ends = part.offsets_e
    if len(ends) > 1:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        ends = ((counts + BLOCK - 1) // BLOCK * BLOCK).cumsum(0, dtype=torch.int32)
    return GroupedPart(dequantize_columns(part.grad), dequantize_columns(part.rows), ends)
