"""Rows of experts [R, C], sorted by expert: largest magnitudes, values per expert, padding, dequantisation.

`offsets_e` are the ends of each expert's rows, on the device; rows from `offsets_e[-1]` on belong to no expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE
from megatron_moe.precision.quantized_tensor import QuantizedCopy, apply_scales, decode_scales, dequantize


def largest_magnitude(x: Tensor, offsets_e: Tensor | None = None) -> Tensor:
    """Largest magnitude of a matrix [R, C] in fp32, a scalar; or with `offsets_e`, of the rows of each expert, [e]. 0
    for empty matrices."""
    if x.shape[1] == 0:
        x = F.pad(x, (0, 1))
    magnitude_R = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1).float()
    if offsets_e is None:
        return F.pad(magnitude_R, (0, 1)).amax()
    expert_R = torch.searchsorted(offsets_e.long(), torch.arange(len(x), device=x.device), right=True)
    of_experts = magnitude_R.new_zeros(len(offsets_e) + 1)
    return of_experts.scatter_reduce(0, expert_R, magnitude_R, "amax")[:-1]


def expand_to_rows(value_e: Tensor, offsets_e: Tensor, num_rows: int) -> Tensor:
    """Expands one value per expert to one value per row; rows after the last expert's rows get its value too."""
    row_R = torch.arange(num_rows, device=offsets_e.device)
    return value_e[torch.searchsorted(offsets_e.long(), row_R, right=True).clamp(max=len(offsets_e) - 1)]


def block_offsets(offsets_e: Tensor, length: int) -> Tensor:
    """Ends of the experts' blocks [e] if every expert's rows are padded to a multiple of `length`."""
    num_rows_e = offsets_e.long().diff(prepend=offsets_e.new_zeros(1, dtype=torch.long))
    return ((num_rows_e + length - 1) // length).cumsum(0)


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of `length` rows, each with rows of one expert and padded with zeros.

    The number of blocks, b = R // length + e, does not depend on the offsets; the last blocks may be empty.
    """

    ends_e: Tensor
    """Ends of the experts' blocks."""
    expert_b: Tensor
    """Expert of each block; the last expert for empty blocks."""
    row_P: Tensor
    """Row index at each of the P = b * length positions of the blocks; R at positions without a row."""
    position_R: Tensor
    """Position of each row in the blocks; P for rows that belong to no expert."""

    @classmethod
    def from_offsets(cls, offsets_e: Tensor, num_rows: int, length: int) -> "ExpertBlocks":
        ends, ends_e, last = offsets_e.long(), block_offsets(offsets_e, length), len(offsets_e) - 1
        block_b = torch.arange(num_rows // length + len(ends), device=ends.device)
        position_P = torch.arange(len(block_b) * length, device=ends.device)
        expert_b = torch.searchsorted(ends_e, block_b, right=True).clamp_(max=last)
        first_rows, first_positions = F.pad(ends[:-1], (1, 0)), F.pad(ends_e[:-1] * length, (1, 0))
        shift_e = first_positions - first_rows
        row_P = position_P - shift_e[expert_b].repeat_interleave(length)
        row_P = torch.where(row_P < ends[expert_b].repeat_interleave(length), row_P, num_rows)
        row_R = torch.arange(num_rows, device=ends.device)
        position_R = row_R + shift_e[torch.searchsorted(ends, row_R, right=True).clamp_(max=last)]
        return cls(ends_e, expert_b, row_P, torch.where(row_R < ends[-1], position_R, len(position_P)))

    def gather(self, rows_RC: Tensor) -> Tensor:
        """Copies rows [R, C] into the blocks, [P, C]; padding is 0."""
        return _pad_row(rows_RC.detach()).index_select(0, self.row_P)

    def scatter(self, blocks_PC: Tensor) -> Tensor:
        """Inverse of `gather`, [R, C]; rows that belong to no expert are 0."""
        return _pad_row(blocks_PC).index_select(0, self.position_R)


def _pad_row(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 1))


def pad_to_blocks(x: Tensor, offsets_e: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies rows [R, C] so that every expert starts at a block of `length` rows; the rest is 0. Returns the copy
    [(R // length + e) * length, C] and the ends of the experts' blocks, [e]."""
    blocks = ExpertBlocks.from_offsets(offsets_e, len(x), length)
    return blocks.gather(x), blocks.ends_e


def dequantize_expert_rows(
    copy: QuantizedCopy, block: tuple[int, int], offsets_e: Tensor, dtype: torch.dtype, *, columnwise: bool
) -> Tensor:
    """Values of the rowwise or columnwise copy of a `QuantizedTensor`, in its layout, in `dtype` (at least fp32).
    Values that belong to no expert are undefined."""
    if block == WHOLE:
        scale_R = expand_to_rows(copy.scales.to(dtype), offsets_e, copy.data.shape[1 if columnwise else 0])
        return copy.data.to(dtype) * (scale_R if columnwise else scale_R[:, None])
    if copy.factor is None:
        return dequantize(copy, block, dtype)
    scales = decode_scales(copy.scales).to(dtype)
    ends = block_offsets(offsets_e, block[1]) if columnwise else offsets_e
    factor = expand_to_rows(copy.factor.to(dtype), ends, scales.shape[0 if columnwise else 1])
    scales = scales * (factor[:, None] if columnwise else factor)
    return apply_scales(copy.data, scales, block)
