"""Fakes of FP8 and FP4 kernels for memory emulation: they allocate the results of the fused kernels, on `meta`."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import WHOLE, OperandFormat
from megatron_moe.kernels.fakes.backend import fake_backend
from megatron_moe.kernels.ops import QuantizedActivationGrads, RowIndex, WeightPart
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor
from megatron_moe.precision.quantizers import SCALE_DTYPES, element_dtype


def quantize_rows(
    x: Tensor, fmt: OperandFormat, *, rowwise: bool, columnwise: bool, offsets_e: Tensor | None = None, **options: Any
) -> QuantizedTensor:
    num_rows, num_columns = x.shape
    length, num_matrices = fmt.block[1], 1 if offsets_e is None else len(offsets_e)
    row = column = None
    if rowwise:
        row = _copy(x, (num_rows, num_columns), fmt, _blocks(num_columns, length), num_matrices)
    if columnwise:
        blocks = _blocks(num_rows, length)
        if offsets_e is not None and length:
            blocks = num_rows // length + num_matrices
            num_rows = blocks * length
        column = _copy(x, (num_columns, num_rows), fmt, blocks, num_matrices)
    return QuantizedTensor(row, column, fmt.block, x.dtype)


def quantize_weight(
    weight: Tensor, fmt: OperandFormat, *, columnwise: bool, out: QuantizedTensor | None = None, **options: Any
) -> QuantizedTensor:
    if out is not None:
        return out
    *stack, outputs, inputs = weight.shape
    num_matrices = stack[0] if stack else 1
    shapes = ((*stack, outputs, inputs), (*stack, inputs, outputs))
    row, column = (
        _copy(weight, shape, fmt, num_matrices * _blocks(shape[-1], fmt.block[1]), num_matrices) for shape in shapes
    )
    return QuantizedTensor(row, column if columnwise else None, fmt.block, weight.dtype)


def weight_amax_(amax: Tensor, part: WeightPart, block: tuple[int, int]) -> None:
    """Fake that allocates nothing, since the real op works in place."""


def quantize_weight_part(part: WeightPart, factors: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """Fake that allocates nothing, since the real op writes to `out`."""


def transpose_weight(data: Tensor) -> Tensor:
    if data.dtype == torch.uint8:
        *stack, rows, half = data.shape
        return data.new_empty(*stack, 2 * half, rows // 2)
    return torch.empty_like(data.mT, memory_format=torch.contiguous_format)


def quantize_permuted(
    tokens_TH: Tensor, index: RowIndex, fmt: OperandFormat, *, rowwise: bool = True, columnwise: bool = False
) -> QuantizedTensor:
    rows_RH = tokens_TH[:1].expand(len(index.token_R), -1)
    return quantize_rows(rows_RH, fmt, rowwise=rowwise, columnwise=columnwise, offsets_e=index.offsets_E)


def permute_quantized(tokens: QuantizedTensor, index: RowIndex) -> tuple[Tensor, QuantizedTensor]:
    data, scales, _ = tokens.row_copy
    num_rows = len(index.token_R)
    rows_RH = data.new_empty(num_rows, data.shape[1], dtype=tokens.dtype)
    copy = QuantizedCopy(data.new_empty(rows_RH.shape), scales.new_empty(len(scales), num_rows))
    return rows_RH, QuantizedTensor(copy, None, tokens.block, tokens.dtype)


def dequantize_rows(rows: QuantizedTensor) -> Tensor:
    return torch.empty_like(rows.row_copy.data, dtype=rows.dtype)


def quantize_activation(
    x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, fmt: OperandFormat
) -> QuantizedTensor:
    return quantize_rows(x_RF[:, : x_RF.shape[1] // config.fc1_width_factor], fmt, rowwise=True, columnwise=False)


def quantize_activation_grad(
    grad_RF: Tensor,
    x_RF: Tensor,
    probs_R: Tensor | None,
    config: ActivationConfig,
    fmt: OperandFormat,
    *,
    columns: OperandFormat | None = None,
    offsets_e: Tensor | None = None,
) -> QuantizedActivationGrads:
    grad_x_q = quantize_rows(x_RF, fmt, rowwise=True, columnwise=columns is not None, offsets_e=offsets_e)
    grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
    if columns is None:
        return QuantizedActivationGrads(grad_x_q, torch.empty_like(x_RF), grad_probs_R, torch.empty_like(grad_RF))
    out_q = quantize_rows(grad_RF, columns, rowwise=False, columnwise=True, offsets_e=offsets_e)
    return QuantizedActivationGrads(grad_x_q, None, grad_probs_R, out_q)


def rms_norm_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, fmt: OperandFormat
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    norms, options = fake_backend("triton"), (weight, eps, zero_centered)
    total, normed = (x, norms.rms_norm(x, *options)) if residual is None else norms.add_rms_norm(residual, x, *options)
    return total, normed, quantize_rows(normed.detach().flatten(0, -2), fmt, rowwise=True, columnwise=False)


def quantized_linear_forward(x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    rows, outputs = x.row_copy.data.shape[0], weight.row_copy.data.shape[-2]
    return x.row_copy.data.new_empty(rows, outputs, dtype=x.dtype)


def quantized_linear_input_grad(grad: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    rows, inputs = grad.row_copy.data.shape[0], weight.column_copy.data.shape[-2]
    return grad.row_copy.data.new_empty(rows, inputs, dtype=grad.dtype)


def quantized_linear_weight_grad(grad: object, x: object, out: Tensor, accumulate: bool) -> None:
    """Fake that allocates nothing, since the real op writes to `out`."""


def quantized_grouped_forward(rows: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    return quantized_linear_forward(rows, weight, None)


def quantized_grouped_input_grad(grad: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    return quantized_linear_input_grad(grad, weight)


def quantized_grouped_weight_grad(parts: object, out: Tensor, accumulate: bool) -> None:
    """Fake that allocates nothing, since the real op writes to `out`."""


def _blocks(size: int, length: int) -> int:
    return -(-size // length) if length else 1


def _copy(x: Tensor, shape: tuple[int, ...], fmt: OperandFormat, blocks: int, num_matrices: int) -> QuantizedCopy:
    """Allocates a quantised copy of `num_matrices` matrices: data of `shape`, and scales of `blocks` blocks along its
    last dim."""
    data = x.new_empty((*shape[:-1], -(-shape[-1] * fmt.bits // 8)), dtype=element_dtype(fmt.element))
    scales: tuple[int, ...] = (num_matrices,)
    if fmt.block != WHOLE:
        scales = blocks, _blocks(shape[-2], fmt.block[0])
    return QuantizedCopy(data, x.new_empty(scales, dtype=SCALE_DTYPES[fmt.scale]))
