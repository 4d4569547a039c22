"""Quantiser of the recipe nvfp4 in plain torch (arXiv 2509.25149).

Elements are E2M1 with one E4M3 scale per 16 elements, or per 16x16 elements for weights, and one fp32 factor per
matrix. The columnwise copies of inputs and gradients, which only the weight gradient reads, are multiplied by a 16x16
Hadamard matrix with fixed random signs along the tokens, which cancels in the GEMM. Tests use shorter blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.precision.dither import block_dither
from megatron_moe.precision.expert_rows import expand_to_rows, largest_magnitude, pad_to_blocks
from megatron_moe.precision.quantized_tensor import (
    QuantizedCopy,
    QuantizedTensor,
    e2m1_codes,
    e2m1_values,
    scale_blocks_,
)

_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Random signs of the Hadamard transform, the same as in Transformer Engine."""


def quantize_rows(
    x: Tensor,
    fmt: OperandFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    offsets_e: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedTensor:
    """Quantises rows [R, C]; see `Kernels.quantize_rows`."""
    assert seed is not None or not fmt.stochastic, "stochastic rounding without a seed"
    seed = seed if fmt.stochastic else None
    size, row, column = fmt.block[1], None, None
    if offsets_e is None:
        row = _quantize(x, fmt, seed) if rowwise else None
        column = _quantize(hadamard(_whole_blocks(x.T, size), size), fmt, seed) if columnwise else None
    else:
        if rowwise:
            is_row_R = torch.arange(len(x), device=x.device) < offsets_e[-1]
            scale = _matrix_scale(largest_magnitude(x, offsets_e))
            rows = torch.where(is_row_R[:, None], x.detach(), 0)
            row = _quantize(rows, fmt, seed, scale, expand_to_rows(scale, offsets_e, len(x)))
        if columnwise:
            padded, block_ends = pad_to_blocks(x, offsets_e, size)
            transposed = hadamard(padded.T, size)
            by_block = transposed.T.unflatten(0, (-1, size)).flatten(1)
            scale = _matrix_scale(largest_magnitude(by_block, block_ends))
            column = _quantize(transposed, fmt, seed, scale, expand_to_rows(scale, block_ends, len(by_block))[:, None])
    return QuantizedTensor(row, column, fmt.block, x.dtype)


def quantize_weight(weight: Tensor, fmt: OperandFormat, *, columnwise: bool) -> QuantizedTensor:
    """Quantises a weight [O, I] or [e, O, I] in 16x16 blocks; see `Kernels.quantize_weight`."""
    outputs, inputs = weight.shape[-2:]
    height, width = fmt.block
    whole = F.pad(weight.detach(), (0, -inputs % width, 0, -outputs % height))
    scale = _matrix_scale(whole.abs().float().amax(dim=(-2, -1)))
    factor = 1 / scale
    codes, scales = _codes(whole, fmt, None, scale[..., None, None])
    row = QuantizedCopy(pack_e2m1(codes[..., :outputs, :]), scales, factor)
    column = None
    if columnwise:
        column = QuantizedCopy(pack_e2m1(codes.mT[..., :inputs, :]), scales.mT.contiguous(), factor)
    return QuantizedTensor(row, column, fmt.block, weight.dtype)


def weight_scales(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes NVFP4's two-level scales from block magnitudes `amax`, fp32 [..., blocks along O, blocks along I].
    Returns (fp32 multipliers of the elements, E4M3 block scales, fp32 scale per matrix [...], see
    `second_level_scale`)."""
    scale = _matrix_scale(amax.amax(dim=(-2, -1)))
    return *_block_scales(amax, scale[..., None, None]), 1 / scale


def encode(scaled: Tensor) -> Tensor:
    """Rounds fp32 values [..., C] to nearest E2M1 codes, with saturation, and packs them, uint8 [..., C / 2]."""
    return pack_e2m1(_round(scaled.clamp(-_LARGEST, _LARGEST), None))


def transpose(data: Tensor) -> Tensor:
    """Transposes packed codes [..., R, C / 2], R even, to [..., C, R / 2]."""
    return pack_e2m1(e2m1_codes(data).mT)


def hadamard(x: Tensor, size: int = 16) -> Tensor:
    """Multiplies every `size` consecutive elements of the last dim by diag(signs) H / sqrt(size), in fp32, where size
    is a power of two up to 16; keeps the dtype."""
    # H[i, j] is -1 if i & j has an odd number of bits; bit n of 0x6996 is the parity of n
    place = torch.arange(size, device=x.device)
    odd = 0x6996 >> (place[:, None] & place)
    negative = sum(1 << place for place, sign in enumerate(_SIGNS) if sign < 0)
    matrix = (1 - 2 * ((odd ^ (negative >> place)[:, None]) & 1)) / size**0.5
    return (x.detach().float().unflatten(-1, (-1, size)) @ matrix).flatten(-2).to(x.dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs uint8 codes [..., C], C even, into bytes [..., C / 2]; even elements are in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def second_level_scale(amax: Tensor) -> Tensor:
    """Second-level fp32 scale by which dequantisation multiplies: the reciprocal of `_matrix_scale`, for matrices with
    the largest magnitudes `amax`."""
    return 1 / _matrix_scale(amax)


def amax_of_scale(factor: Tensor) -> Tensor:
    """Inverse of `second_level_scale`, up to rounding, for magnitudes other than 0."""
    return factor * (_LARGEST * _LARGEST_SCALE)


def _quantize(
    x: Tensor, fmt: OperandFormat, seed: Tensor | None, scale: Tensor | None = None, of_blocks: Tensor | None = None
) -> QuantizedCopy:
    """Quantises a matrix [R, C]. `scale`: see `_matrix_scale`; None computes it from `x`. For expert rows, `scale` is
    [e] and `of_blocks` are the same values broadcast to the block scales [C / 16, R]."""
    if scale is None:
        scale = of_blocks = _matrix_scale(largest_magnitude(x))
    assert of_blocks is not None
    codes, scales = _codes(_whole_blocks(x, fmt.block[1]), fmt, seed, of_blocks)
    return QuantizedCopy(pack_e2m1(codes), scales, scale.reciprocal())


def _matrix_scale(amax: Tensor) -> Tensor:
    """Factor by which all elements of matrices with the largest magnitudes `amax` (fp32) are multiplied: 1 for 0, nan
    for inf or nan."""
    scale = (torch.full_like(amax, _LARGEST * _LARGEST_SCALE) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def _codes(x: Tensor, fmt: OperandFormat, seed: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, block scales) of matrices [..., R, C] that consist of whole blocks. `seed`: seed of stochastic
    rounding; None rounds to nearest. `scale`: see `_matrix_scale`; broadcasts to the scales of blocks."""
    height, size = fmt.block
    by_block = x.detach().unflatten(-1, (-1, size)).unflatten(-3, (-1, height))
    block_amax = torch.linalg.vector_norm(by_block, torch.inf, dim=(-3, -1)).float()
    if height == 1:
        block_amax = block_amax.mT.contiguous()
    inverse, scales = _block_scales(block_amax, scale)
    wide = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    scaled = scale_blocks_(wide, inverse, fmt.block).clamp_(-_LARGEST, _LARGEST)
    return _round(scaled, None if seed is None else block_dither(scaled, size, seed)), scales


def _block_scales(amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (fp32 multiplier of the elements, E4M3 scale) of each block. `amax`: largest magnitude per block, fp32;
    `scale`: factor of the matrix, see `_matrix_scale`."""
    per_code = scale * torch.full((), 1 / _LARGEST, device=amax.device)
    scales = (amax * per_code).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    return scales.float().mul_(scale.reciprocal()).reciprocal_().clamp_(max=torch.finfo(torch.float32).max), scales


def _round(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """E2M1 codes of values in [-6, 6]: rounded to nearest with ties to even codes, or stochastically."""
    magnitude = scaled.abs()
    values = e2m1_values(torch.arange(8, dtype=torch.int16, device=scaled.device)).float()
    if noise is None:
        # ties above even codes are inclusive: a tie between codes 1 and 2 becomes 2, between 0 and 1 becomes 0
        steps = (values[1:] + values[:-1]) / 2
        steps[::2] = steps[::2].nextafter(values[-1:])
        codes = _codes_below(steps, magnitude)
    else:
        codes = _codes_below(values[1:7], magnitude)
        low, spacing = F.embedding(codes, torch.stack([values[:-1], values.diff()], dim=-1)).unbind(-1)
        codes += noise < magnitude.sub_(low).div_(spacing)
    return codes.add_(scaled < 0, alpha=8).to(torch.uint8)


def _codes_below(steps: Tensor, magnitude: Tensor) -> Tensor:
    """Number of E2M1 thresholds that do not exceed each magnitude, int32; all of them for nan."""
    return torch.bucketize(magnitude.contiguous(), steps, out_int32=True, right=True)


def _whole_blocks(x: Tensor, size: int) -> Tensor:
    """Pads the last dim with zeros to whole blocks."""
    return F.pad(x, (0, -x.shape[-1] % size)) if x.shape[-1] % size else x
