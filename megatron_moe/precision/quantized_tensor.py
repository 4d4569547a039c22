"""Quantised matrices: bytes and scales of the copies that GEMMs read, and their conversion back to floating point."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE


class QuantizedCopy(NamedTuple):
    """Matrix [..., R, C], or stack of matrices, quantised along its last dim."""

    data: Tensor
    """float8_e4m3fn or float8_e5m2 [..., R, C]; uint8 [..., R, C / 2] for E2M1, with even columns in the low bits."""
    scales: Tensor
    """Scale of every block; see `QuantizedTensor`."""
    factor: Tensor | None = None
    """Second-level scale of each matrix (nvfp4), fp32 [...]; None for other formats."""


@dataclass(frozen=True)
class QuantizedTensor:
    """Low-precision matrix, or stack of matrices, as an operand of matrix multiplications.

    It holds up to two quantised copies of the matrix. A GEMM reads the copy whose blocks extend along its reduction
    dimension: for y = x W^T, forward reads the `rowwise` copies of x and W, the input gradient the `rowwise` copy of
    the output gradient and the `columnwise` copy of W, and the weight gradient the `columnwise` copies of x and of the
    output gradient. A value is its element times the scale of its block and, for nvfp4, times the factor of its matrix.
    With a block (1, n), the scales of a copy [..., R, C] are [..., ceil(C / n), R]; with (n, n), [..., ceil(R /
    n), ceil(C / n)]; with `WHOLE`, [...]. They are fp32, except E8M0 exponents (uint8, mxfp8) and float8_e4m3fn
    (nvfp4).

    Rows of experts ([R, C], sorted by expert) are quantised per expert. With `WHOLE`, the scales are [e], one per
    expert. Otherwise, `columnwise` pads each expert's rows with zeros to whole blocks: there are R // n + e blocks, of
    which the last ones may be unused, with bytes [C, blocks * n] and scales [blocks, C].

    Copies in E2M1 are padded with zeros along their last dim to whole blocks, because elements share bytes and the
    Hadamard transform mixes the elements of a block.
    """

    rowwise: QuantizedCopy | None
    """Copy of the matrix [..., R, C]; None if no GEMM reads it."""
    columnwise: QuantizedCopy | None
    """Copy of the transposed matrix [..., C, R]; None if no GEMM reads it."""
    block: tuple[int, int]
    """Shape of the blocks that share a scale: (1, 128), (128, 128), (1, 32), (1, 16), (16, 16) or `WHOLE`."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the tensor that was quantised, and of the results of GEMMs."""

    @property
    def row_copy(self) -> QuantizedCopy:
        assert self.rowwise is not None, "the tensor has no rowwise copy"
        return self.rowwise

    @property
    def column_copy(self) -> QuantizedCopy:
        assert self.columnwise is not None, "the tensor has no columnwise copy"
        return self.columnwise

    def copy_(self, other: "QuantizedTensor") -> "QuantizedTensor":
        """Overwrites all tensors with those of `other`, which has the same copies and shapes; returns itself."""
        for own, source in zip(self.tensors, other.tensors, strict=True):
            assert (own is None) == (source is None), "the tensors have different copies"
            if own is not None and source is not None:
                own.copy_(source)
        return self

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Data, scales and factor of the rowwise copy, then of the columnwise copy; None for a missing copy."""
        missing = None, None, None
        return *(self.rowwise or missing), *(self.columnwise or missing)

    def only_columnwise(self) -> "QuantizedTensor":
        """Returns the tensor without the rowwise copy, because weight gradients read only the columnwise one."""
        return replace(self, rowwise=None)


def dequantize(copy: QuantizedCopy, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Values of a quantised copy [..., R, C] in `dtype`, which must be at least fp32."""
    scales = decode_scales(copy.scales).to(dtype)
    if copy.factor is not None:
        scales = scales * copy.factor.to(dtype)[..., None, None]
    return apply_scales(copy.data, scales, block)


def apply_scales(data: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Values of the elements of a quantised copy [..., R, C] in the dtype of the decoded `scales`."""
    values = unpack_e2m1(data, scales.dtype) if data.dtype == torch.uint8 else data.to(scales.dtype)
    return scale_blocks_(values, scales, block)


def scale_blocks_(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies every block of contiguous values [..., R, C] by its scale, in place."""
    height, width = block
    if block == WHOLE or values.shape[-1] % width or values.shape[-2] % height:
        return values.mul_(expand_scales(scales, block, *values.shape[-2:]))
    of_blocks = scales.mT[..., None, :, None] if height == 1 else scales[..., None, :, None]
    values.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).mul_(of_blocks)
    return values


def expand_scales(scales: Tensor, block: tuple[int, int], num_rows: int, num_columns: int) -> Tensor:
    """Scale of every element of a copy [..., R, C], in a shape that broadcasts to it."""
    if block == WHOLE:
        return scales[..., None, None]
    if block[0] == 1:
        return scales.mT.repeat_interleave(block[1], dim=-1)[..., :num_columns]
    per_row = scales.repeat_interleave(block[1], dim=-1)[..., :num_columns]
    return per_row.repeat_interleave(block[0], dim=-2)[..., :num_rows, :]


def decode_scales(scales: Tensor) -> Tensor:
    """fp32 values of scales. uint8: E8M0 exponents e of the values 2^(e - 127); 255 is nan."""
    if scales.dtype != torch.uint8:
        return scales.float()
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # bits of 2^-127, which is subnormal
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))


def unpack_e2m1(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., C] of packed E2M1 codes, uint8 [..., C / 2]."""
    byte = torch.arange(256, dtype=torch.int16, device=data.device)
    pairs = e2m1_values(e2m1_codes(byte)).to(dtype).view(256, 2)
    return F.embedding(data.to(torch.int32), pairs).flatten(-2)


def e2m1_codes(data: Tensor) -> Tensor:
    """E2M1 codes [..., C], one per byte, of packed codes, uint8 [..., C / 2]."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def e2m1_values(codes: Tensor) -> Tensor:
    """fp16 values of E2M1 codes, int16: 0, 0.5, 1, 1.5, 2, 3, 4, 6 of 0 to 7, negative ones of 8 to 15. They are
    computed from bits, because a captured CUDA graph cannot copy a table from the host."""
    bits = (codes & 7) << 9 | (codes & 8) << 12  # exponent and mantissa are adjacent in both formats
    return bits.view(torch.float16) * 2.0**14


def expert_copies(
    copy: QuantizedCopy, block: tuple[int, int], ends: list[int], *, columnwise: bool
) -> list[QuantizedCopy]:
    """Splits a copy of expert rows into one copy per expert, with the padding of columnwise copies. `ends`: end of each
    expert's rows."""
    bytes_per_block = block[1] // 2 if copy.data.dtype == torch.uint8 else block[1]
    parts, first = [], 0
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if block == WHOLE:
            data, scales = copy.data[:, start:end] if columnwise else copy.data[start:end], copy.scales[expert]
        elif columnwise:
            last = first - (start - end) // block[1]
            data, scales = copy.data[:, first * bytes_per_block : last * bytes_per_block], copy.scales[first:last]
            first = last
        else:
            data, scales = copy.data[start:end], copy.scales[:, start:end]
        parts.append(QuantizedCopy(data, scales, None if copy.factor is None else copy.factor[expert]))
    return parts
