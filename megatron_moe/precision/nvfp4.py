"""Quantiser of the recipe nvfp4 in plain torch (arXiv 2509.25149).

Elements are E2M1 with one E4M3 scale per 16 elements, or per 16x16 elements for weights, and one fp32 factor per
matrix. The columnwise copies of inputs and gradients, which only the weight gradient reads, are multiplied by a 16x16
Hadamard matrix with fixed random signs along the tokens, which cancels in the product. Tests use shorter blocks.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.precision.dither import block_dither
from megatron_moe.precision.expert_rows import largest_magnitude, of_rows, pad_to_blocks
from megatron_moe.precision.quantized_tensor import (
    QuantizedCopy,
    QuantizedTensor,
    e2m1_codes,
    e2m1_magnitudes,
    spread_scales,
)

_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes of successive E2M1 codes."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the Hadamard transform, those of Transformer Engine."""


def quantize_rows(
    x: Tensor,
    form: OperandFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    offsets_e: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedTensor:
    """Quantises rows [R, C]; see `Kernels.quantize_rows`."""
    assert seed is not None or not form.stochastic, "stochastic rounding without a seed"
    seed = seed if form.stochastic else None
    size, row, column = form.block[1], None, None
    if offsets_e is None:
        row = _quantize(x, form, seed) if rowwise else None
        column = _quantize(hadamard(_whole_blocks(x.T, size), size), form, seed) if columnwise else None
    else:
        if rowwise:
            is_row_R = torch.arange(len(x), device=x.device) < offsets_e[-1]
            scale = _matrix_scale(largest_magnitude(x, offsets_e))
            rows = torch.where(is_row_R[:, None], x.detach(), 0)
            row = _quantize(rows, form, seed, scale, of_rows(scale, offsets_e, len(x)))
        if columnwise:
            padded, block_ends = pad_to_blocks(x, offsets_e, size)
            transposed = hadamard(padded.T, size)
            by_block = transposed.T.unflatten(0, (-1, size)).flatten(1)
            scale = _matrix_scale(largest_magnitude(by_block, block_ends))
            column = _quantize(transposed, form, seed, scale, of_rows(scale, block_ends, len(by_block))[:, None])
    return QuantizedTensor.of(row, column, form.block, x.dtype)


def quantize_weight(weight: Tensor, form: OperandFormat, *, columnwise: bool) -> QuantizedTensor:
    """Quantises a weight [O, I] or [e, O, I] in 16x16 blocks; see `Kernels.quantize_weight`."""
    outputs, inputs = weight.shape[-2:]
    height, width = form.block
    whole = F.pad(weight.detach(), (0, -inputs % width, 0, -outputs % height))
    scale = _matrix_scale(whole.abs().float().amax(dim=(-2, -1)))
    factor = 1 / scale
    codes, scales = _codes(whole, form, None, scale[..., None, None])
    row = QuantizedCopy(pack_e2m1(codes[..., :outputs, :]), scales, factor)
    column = None
    if columnwise:
        column = QuantizedCopy(pack_e2m1(codes.mT[..., :inputs, :]), scales.mT.contiguous(), factor)
    return QuantizedTensor.of(row, column, form.block, weight.dtype)


def weight_scales(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fp32 factors by which elements are multiplied, E4M3 scales of the blocks, fp32 factor of each matrix [...]) of
    weights whose blocks have the largest magnitudes `amax`, fp32 [..., blocks along O, blocks along I]."""
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
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    negative = sum(1 << place for place, sign in enumerate(_SIGNS) if sign < 0)
    signs = 1 - 2 * (negative >> torch.arange(size, device=x.device) & 1)
    matrix = signs[:, None] * matrix / size**0.5
    return (x.detach().float().unflatten(-1, (-1, size)) @ matrix).flatten(-2).to(x.dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs uint8 codes [..., C], C even, into bytes [..., C / 2]; even elements are in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def factor_of(amax: Tensor) -> Tensor:
    """fp32 factor of the scales of matrices with the largest magnitudes `amax`."""
    return 1 / _matrix_scale(amax)


def amax_of(factor: Tensor) -> Tensor:
    """Inverse of `factor_of`, up to rounding, for magnitudes other than 0."""
    return factor * (_LARGEST * _LARGEST_SCALE)


def _quantize(
    x: Tensor, form: OperandFormat, seed: Tensor | None, scale: Tensor | None = None, of_blocks: Tensor | None = None
) -> QuantizedCopy:
    """Quantises a matrix [R, C]. Rows of experts: `scale` [e] of the experts, and `of_blocks`, which broadcasts to the
    scales of blocks [C / 16, R]."""
    if scale is None:
        scale = of_blocks = _matrix_scale(largest_magnitude(x))
    assert of_blocks is not None
    codes, scales = _codes(_whole_blocks(x, form.block[1]), form, seed, of_blocks)
    return QuantizedCopy(pack_e2m1(codes), scales, 1 / scale)


def _matrix_scale(amax: Tensor) -> Tensor:
    """Factor by which all elements of matrices with the largest magnitudes `amax` (fp32) are multiplied."""
    scale = (torch.full_like(amax, _LARGEST * _LARGEST_SCALE) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _codes(x: Tensor, form: OperandFormat, seed: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and scales of blocks, of matrices [..., R, C] in whole blocks. `seed`: None rounds to nearest.
    `scale`: see `_matrix_scale`; broadcasts to the scales of blocks."""
    height, size = form.block
    wide = x.detach().float()
    block_amax = wide.abs().unflatten(-1, (-1, size)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))
    if height == 1:
        block_amax = block_amax.mT.contiguous()
    inverse, scales = _block_scales(block_amax, scale)
    scaled = (wide * spread_scales(inverse, form.block, *x.shape[-2:])).clamp(-_LARGEST, _LARGEST)
    return _round(scaled, None if seed is None else block_dither(scaled, size, seed)), scales


def _block_scales(amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(fp32 factors by which elements are multiplied, E4M3 scales) of blocks with the largest magnitudes `amax`."""
    per_code = scale * torch.full((), 1 / _LARGEST, device=amax.device)
    scales = (amax * per_code).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    return (1 / (scales.float() * (1 / scale))).clamp(max=torch.finfo(torch.float32).max), scales


def _round(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """E2M1 codes of values in [-6, 6]: nearest, ties to even codes; or up with the probability of the fraction."""
    magnitude = scaled.abs()
    if noise is None:
        # odd thresholds are inclusive: a tie between codes 1 and 2 becomes 2, between 0 and 1 becomes 0
        above = _count(~(magnitude <= step) for step in _STEPS)
        at_least = _count(~(magnitude < step) for step in _STEPS)
        codes = torch.where(at_least % 2 == 0, at_least, above)
    else:
        low = _count(~(magnitude < value) for value in _MAGNITUDES[1:7])
        value = e2m1_magnitudes(low)
        fraction = (magnitude - value) / (e2m1_magnitudes(low + 1) - value)
        codes = low + (noise < fraction)
    return (codes + 8 * (scaled < 0)).to(torch.uint8)


def _count(conditions: Iterable[Tensor]) -> Tensor:
    """Number of true conditions for every element, int64."""
    return torch.stack(list(conditions)).sum(dim=0)


def _whole_blocks(x: Tensor, size: int) -> Tensor:
    """Pads the last dim with zeros to whole blocks."""
    return F.pad(x, (0, -x.shape[-1] % size))
