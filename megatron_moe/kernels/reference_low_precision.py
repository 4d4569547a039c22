"""Reference implementation of matrix multiplications with quantised operands: dequantises, then multiplies. Also of
the quantisation of parts of weights.

Operands are converted to promote(fp32, their dtype), in which products are computed. With scales that are powers of
two, the results differ from those of FP8 tensor cores only by the order and precision of the sums.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE
from megatron_moe.kernels.low_precision_state import round_weights
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand, WeightPart, internal_dtype
from megatron_moe.precision import nvfp4
from megatron_moe.precision.expert_rows import dequantize_expert_rows
from megatron_moe.precision.quantized_tensor import QuantizedTensor, dequantize
from megatron_moe.precision.quantizers import DTYPES, cast


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
        ends = offsets_e.tolist()
        pairs = zip(_expert_columns(grad, offsets_e, ends), _expert_columns(rows, offsets_e, ends), strict=True)
        for expert, (grad_OR, rows_IR) in enumerate(pairs):
            _store(out[expert], grad_OR.to(out.dtype) @ rows_IR.to(out.dtype).mT, accumulate or number > 0)


def _by_expert(rows: MatrixOperand, weight_eIO: Tensor, offsets_e: Tensor) -> Tensor:
    """Multiplies the rows of each expert by its matrix [I, O]."""
    each_RI = _split(_expert_values(rows, offsets_e, columnwise=False), [0, *offsets_e.tolist()])
    products = [rows_RI @ weight_IO for rows_RI, weight_IO in zip(each_RI, weight_eIO, strict=True)]
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


def _expert_columns(operand: MatrixOperand, offsets_e: Tensor, ends: list[int]) -> list[Tensor]:
    """Values [C, r] of each expert's transposed rows; quantised ones are padded with zeros to whole blocks."""
    values_CR = _expert_values(operand, offsets_e, columnwise=True)
    if isinstance(operand, QuantizedTensor) and operand.block != WHOLE:
        length = operand.block[1]
        sizes = (-(-(end - start) // length) * length for start, end in pairwise([0, *ends]))
        ends = list(accumulate(sizes))
    return [part.T for part in _split(values_CR.T, [0, *ends])]


def _expert_values(operand: MatrixOperand, offsets_e: Tensor, *, columnwise: bool) -> Tensor:
    """Values of all rows [R, C], or of the columnwise copy, in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    if isinstance(operand, Tensor):
        return (operand.T if columnwise else operand).to(wide)
    copy = operand.column_copy if columnwise else operand.row_copy
    return dequantize_expert_rows(copy, operand.block, offsets_e, wide, columnwise=columnwise)


def _split(rows: Tensor, bounds: list[int]) -> list[Tensor]:
    return [rows[start:end] for start, end in pairwise(bounds)]


def _store(out: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)


def weight_amax_(amax: Tensor, part: WeightPart, block: tuple[int, int]) -> None:
    inputs, (first, last) = part.shape[-1], _rows_of(part)
    rows = part.values.new_zeros((last - first) * inputs, dtype=torch.float32)
    skipped = part.start - first * inputs
    rows[skipped : skipped + len(part.values)] = round_weights(part.values, part.dtype).float().abs()
    rows = F.pad(rows.view(-1, inputs), (0, -inputs % block[1])).unflatten(1, (-1, block[1])).amax(dim=2)
    found = torch.zeros_like(amax, memory_format=torch.contiguous_format).flatten(0, 1)
    found.scatter_reduce_(0, _block_rows(part, amax, block[0])[:, None].expand_as(rows), rows, "amax")
    torch.maximum(amax, found.view(amax.shape), out=amax)


def quantize_weight_part(part: WeightPart, factors: Tensor, block: tuple[int, int], out: Tensor) -> None:
    inputs, (first, _) = part.shape[-1], _rows_of(part)
    per_row = factors.flatten(0, 1)[_block_rows(part, factors, block[0])]
    skipped = part.start - first * inputs
    per_element = per_row.repeat_interleave(block[1], dim=1)[:, :inputs].flatten()[skipped:][: len(part.values)]
    element = next(name for name, dtype in DTYPES.items() if dtype == out.dtype)
    out.copy_(cast(round_weights(part.values, part.dtype).float() * per_element, element))


def transpose_weight(data: Tensor) -> Tensor:
    return nvfp4.transpose(data) if data.dtype == torch.uint8 else data.mT.contiguous()


def _rows_of(part: WeightPart) -> tuple[int, int]:
    """(First row of a part, row after the last one), over all matrices of a stack."""
    inputs = part.shape[-1]
    return part.start // inputs, -(-(part.start + len(part.values)) // inputs)


def _block_rows(part: WeightPart, of_blocks: Tensor, height: int) -> Tensor:
    """Index of each row's blocks in `of_blocks` [e, blocks along O, blocks along I], flattened over its first dims."""
    row = torch.arange(*_rows_of(part), device=of_blocks.device)
    outputs = part.shape[-2]
    return row // outputs * of_blocks.shape[1] + row % outputs // height
