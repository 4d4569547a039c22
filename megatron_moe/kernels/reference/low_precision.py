"""Reference implementation of matrix multiplications with quantised operands: dequantises, then multiplies. Also
quantises parts of weights.

Operands are converted to promote(fp32, their dtype), in which GEMMs are computed. With scales that are powers of
two, the results differ from those of FP8 tensor cores only by the order and precision of the sums.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE
from megatron_moe.config.registry import ELEMENTS
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand, WeightPart, internal_dtype
from megatron_moe.parallel.parameter import store
from megatron_moe.precision import nvfp4
from megatron_moe.precision.expert_rows import ExpertBlocks, block_offsets, dequantize_expert_rows
from megatron_moe.precision.optimizer_state import round_weights
from megatron_moe.precision.quantized_tensor import QuantizedTensor, dequantize
from megatron_moe.precision.quantizers import cast, element_dtype


def quantized_linear_forward(x: MatrixOperand, weight: MatrixOperand, bias: Tensor | None) -> Tensor:
    out = F.linear(_rows(x), _rows(weight), None if bias is None else bias.to(internal_dtype(bias.dtype)))
    return out.to(x.dtype)


def quantized_linear_input_grad(grad: MatrixOperand, weight: MatrixOperand) -> Tensor:
    return (_rows(grad) @ _columns(weight).mT).to(grad.dtype)


def quantized_linear_weight_grad(grad: MatrixOperand, x: MatrixOperand, out: Tensor, accumulate: bool) -> None:
    wide = torch.promote_types(internal_dtype(grad.dtype), out.dtype)
    store(_columns(grad).to(wide) @ _columns(x).to(wide).mT, out, accumulate)


def quantized_grouped_forward(rows: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
    return _by_expert(rows, _rows(weight).mT, offsets_e)


def quantized_grouped_input_grad(grad: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
    return _by_expert(grad, _columns(weight).mT, offsets_e)


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
    total = out.to(torch.promote_types(internal_dtype(parts[0].grad.dtype), out.dtype))  # rounded once, at the end
    for number, (grad, rows, offsets_e) in enumerate(parts):
        grad_RO, ends_e = _expert_columns(grad, offsets_e)
        rows_RI, _ = _expert_columns(rows, offsets_e)
        blocks = _blocks_of(grad_RO, ends_e)
        grad_bLO, rows_bLI = (_in_blocks(values.to(total.dtype), blocks) for values in (grad_RO, rows_RI))
        sums_bOI = grad_bLO.mT @ rows_bLI
        # a GEMM with a matrix of 0 and 1 sums the blocks of an expert in a fixed order, unlike index_add_ on a GPU
        is_of_eb = (torch.arange(len(offsets_e), device=out.device)[:, None] == blocks.expert_b).to(total.dtype)
        store((is_of_eb @ sums_bOI.flatten(1)).view(out.shape), total, accumulate or number > 0)
    if total is not out:
        out.copy_(total)


def _by_expert(rows: MatrixOperand, weight_eIO: Tensor, offsets_e: Tensor) -> Tensor:
    """Multiplies the rows of each expert by its matrix [I, O]. Rows that belong to no expert are 0."""
    values_RI = _expert_values(rows, offsets_e, columnwise=False)
    blocks = _blocks_of(values_RI, offsets_e)
    out_bLO = _in_blocks(values_RI, blocks) @ weight_eIO[blocks.expert_b]
    return blocks.scatter(out_bLO.flatten(0, 1)).to(rows.dtype)


def _blocks_of(rows: Tensor, offsets_e: Tensor) -> ExpertBlocks:
    """Divides the rows into blocks as long as an expert's mean number of rows.

    The number of rows per expert is known only on the device, but there are at most 2e blocks, so at most 2e GEMMs of
    equal size are computed.
    """
    return ExpertBlocks.from_offsets(offsets_e, len(rows), max(1, -(-len(rows) // len(offsets_e))))


def _rows(operand: MatrixOperand) -> Tensor:
    """Values [..., R, C] in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    return operand.to(wide) if isinstance(operand, Tensor) else dequantize(operand.row_copy, operand.block, wide)


def _columns(operand: MatrixOperand) -> Tensor:
    """Values [..., C, R] of the transposed operand in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    return operand.to(wide).mT if isinstance(operand, Tensor) else dequantize(operand.column_copy, operand.block, wide)


def _in_blocks(rows_RC: Tensor, blocks: ExpertBlocks) -> Tensor:
    return blocks.gather(rows_RC).unflatten(0, (len(blocks.expert_b), -1))


def _expert_columns(operand: MatrixOperand, offsets_e: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (values of all rows [R, C] from the columnwise copy, end of each expert's rows). With quantised operands,
    each expert's rows are padded with zeros to whole blocks."""
    values_RC = _expert_values(operand, offsets_e, columnwise=True).T
    if isinstance(operand, QuantizedTensor) and operand.block != WHOLE:
        return values_RC, block_offsets(offsets_e, operand.block[1]) * operand.block[1]
    return values_RC, offsets_e


def _expert_values(operand: MatrixOperand, offsets_e: Tensor, *, columnwise: bool) -> Tensor:
    """Values of the rows [R, C] or, if `columnwise`, of the transposed copy [C, R], in promote(fp32, dtype)."""
    wide = internal_dtype(operand.dtype)
    if isinstance(operand, Tensor):
        return (operand.T if columnwise else operand).to(wide)
    copy = operand.column_copy if columnwise else operand.row_copy
    return dequantize_expert_rows(copy, operand.block, offsets_e, wide, columnwise=columnwise)


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
    element = next(name for name in ELEMENTS.names() if element_dtype(name) == out.dtype)
    out.copy_(cast(round_weights(part.values, part.dtype).float() * per_element, element))


def transpose_weight(data: Tensor) -> Tensor:
    return nvfp4.transpose(data) if data.dtype == torch.uint8 else data.mT.contiguous()


def dequantize_rows(rows: QuantizedTensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return dequantize(rows.row_copy, rows.block, wide).to(rows.dtype)


def _rows_of(part: WeightPart) -> tuple[int, int]:
    """Returns (first row, row after the last one) of a part, counted over all matrices of a stack."""
    inputs = part.shape[-1]
    return part.start // inputs, -(-(part.start + len(part.values)) // inputs)


def _block_rows(part: WeightPart, of_blocks: Tensor, height: int) -> Tensor:
    """Index of each row's blocks in `of_blocks` [e, blocks along O, blocks along I], flattened over its first dims."""
    row = torch.arange(*_rows_of(part), device=of_blocks.device)
    outputs = part.shape[-2]
    return row // outputs * of_blocks.shape[1] + row % outputs // height
