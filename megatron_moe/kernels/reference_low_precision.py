"""Reference implementation of matrix multiplications with quantised operands: dequantises, then multiplies.

Operands are converted to promote(fp32, their dtype), in which products are computed. With scales that are powers of
two, the results differ from those of FP8 tensor cores only by the order and precision of the sums.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.ops import GroupedPart, MatrixOperand, internal_dtype
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, dequantize, expert_copies


def quantized_linear_forward(x: MatrixOperand, weight: MatrixOperand, bias: Tensor | None) -> Tensor:
    out = F.linear(_rows(x), _rows(weight), None if bias is None else bias.to(internal_dtype(bias.dtype)))
    return out.to(x.dtype)


def quantized_linear_input_grad(grad: MatrixOperand, weight: MatrixOperand) -> Tensor:
    return (_rows(grad) @ _columns(weight).mT).to(grad.dtype)


def quantized_linear_weight_grad(grad: MatrixOperand, x: MatrixOperand, out: Tensor, accumulate: bool) -> None:
    _store(out, _columns(grad).to(out.dtype) @ _columns(x).to(out.dtype).mT, accumulate)


def quantized_grouped_forward(rows: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
    return _by_expert(rows, _rows(weight).mT, offsets_e)


def quantized_grouped_input_grad(grad: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
    return _by_expert(grad, _columns(weight).mT, offsets_e)


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    for number, (grad, rows, offsets_e) in enumerate(parts):
        pairs = zip(_expert_columns(grad, offsets_e), _expert_columns(rows, offsets_e), strict=True)
        for expert, (grad_OR, rows_IR) in enumerate(pairs):
            _store(out[expert], grad_OR.to(out.dtype) @ rows_IR.to(out.dtype).mT, accumulate or number > 0)


def _by_expert(rows: MatrixOperand, weight_eIO: Tensor, offsets_e: Tensor) -> Tensor:
    """Multiplies the rows of each expert by its matrix [I, O]."""
    products = [
        each_RI @ weight_IO for each_RI, weight_IO in zip(_expert_rows(rows, offsets_e), weight_eIO, strict=True)
    ]
    num_rows = (rows.row_copy.data if isinstance(rows, QuantizedTensor) else rows).shape[0]
    out = weight_eIO.new_zeros(num_rows, weight_eIO.shape[2], dtype=rows.dtype)
    out[: sum(map(len, products))] = torch.cat(products)
    return out


def _rows(operand: MatrixOperand) -> Tensor:
    """Values [..., R, C] in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    return operand.to(wide) if isinstance(operand, Tensor) else dequantize(operand.row_copy, operand.block, wide)


def _columns(operand: MatrixOperand) -> Tensor:
    """Values [..., C, R] of the transposed operand in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    return operand.to(wide).mT if isinstance(operand, Tensor) else dequantize(operand.column_copy, operand.block, wide)


def _expert_rows(operand: MatrixOperand, offsets_e: Tensor) -> list[Tensor]:
    """Values [r, C] of each expert's rows."""
    ends = offsets_e.tolist()
    if isinstance(operand, Tensor):
        return [_rows(operand[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return _values(operand, expert_copies(operand.row_copy, operand.block, ends, columnwise=False))


def _expert_columns(operand: MatrixOperand, offsets_e: Tensor) -> list[Tensor]:
    """Values [C, r] of each expert's transposed rows."""
    ends = offsets_e.tolist()
    if isinstance(operand, Tensor):
        return [_columns(operand[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return _values(operand, expert_copies(operand.column_copy, operand.block, ends, columnwise=True))


def _values(operand: QuantizedTensor, copies: Sequence[QuantizedCopy]) -> list[Tensor]:
    wide = internal_dtype(operand.dtype)
    return [dequantize(copy, operand.block, wide) for copy in copies]


def _store(out: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)
