"""Rows of experts [R, C], sorted by expert: largest magnitudes, values per expert, padding, dequantisation.

`offsets_e` are the ends of each expert's rows, on the device; rows from `offsets_e[-1]` on belong to no expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE
from megatron_moe.precision.quantized_tensor import QuantizedCopy, apply_scales, decode_scales, dequantize


def largest_magnitude(x: Tensor, offsets_e: Tensor | None = None) -> Tensor:
    """Largest magnitude of a matrix [R, C] in fp32: a scalar, or [e] for the rows of each expert; 0 if empty."""
    magnitude_R = F.pad(x.detach(), (0, 1)).abs().amax(dim=-1).float()
    if offsets_e is None:
        return F.pad(magnitude_R, (0, 1)).amax()
    expert_R = torch.searchsorted(offsets_e.long(), torch.arange(len(x), device=x.device), right=True)
    of_experts = magnitude_R.new_zeros(len(offsets_e) + 1)
    return of_experts.scatter_reduce(0, expert_R, magnitude_R, "amax")[:-1]


def of_rows(value_e: Tensor, offsets_e: Tensor, num_rows: int) -> Tensor:
    """Value of each row's expert; rows after the last expert get the value of the last expert."""
    row_R = torch.arange(num_rows, device=offsets_e.device)
    return value_e[torch.searchsorted(offsets_e.long(), row_R, right=True).clamp(max=len(offsets_e) - 1)]


def block_offsets(offsets_e: Tensor, length: int) -> Tensor:
    """Ends of the experts' blocks [e] if every expert's rows are padded to a multiple of `length`."""
    num_rows_e = offsets_e.long().diff(prepend=offsets_e.new_zeros(1, dtype=torch.long))
    return ((num_rows_e + length - 1) // length).cumsum(0)


def pad_to_blocks(x: Tensor, offsets_e: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies rows [R, C] so that every expert starts at a block of `length` rows; the rest is 0. Returns the copy
    [(R // length + e) * length, C] and the ends of the experts' blocks, [e]."""
    ends = offsets_e.long()
    starts = F.pad(ends[:-1], (1, 0))
    block_ends = block_offsets(offsets_e, length)
    first_place = F.pad(block_ends[:-1], (1, 0)) * length
    num_places = (len(x) // length + len(ends)) * length
    row_R = torch.arange(len(x), device=x.device)
    expert_R = torch.searchsorted(ends, row_R, right=True).clamp(max=len(ends) - 1)
    is_row_R = row_R < ends[-1]
    place_R = torch.where(is_row_R, first_place[expert_R] + row_R - starts[expert_R], num_places)
    padded = x.new_zeros(num_places + 1, x.shape[1])
    padded[place_R] = torch.where(is_row_R[:, None], x.detach(), 0)
    return padded[:num_places], block_ends


def dequantize_expert_rows(
    copy: QuantizedCopy, block: tuple[int, int], offsets_e: Tensor, dtype: torch.dtype, *, columnwise: bool
) -> Tensor:
    """Values of the rowwise or columnwise copy of a `QuantizedTensor`, in its layout, in `dtype` (at least fp32).
    Values that belong to no expert are undefined."""
    if block == WHOLE:
        scale_R = of_rows(copy.scales.to(dtype), offsets_e, copy.data.shape[1 if columnwise else 0])
        return copy.data.to(dtype) * (scale_R if columnwise else scale_R[:, None])
    if copy.factor is None:
        return dequantize(copy, block, dtype)
    scales = decode_scales(copy.scales).to(dtype)
    ends = block_offsets(offsets_e, block[1]) if columnwise else offsets_e
    factor = of_rows(copy.factor.to(dtype), ends, scales.shape[0 if columnwise else 1])
    scales = scales * (factor[:, None] if columnwise else factor)
    return apply_scales(copy.data, scales, block)
