"""Quantiser of the recipe nvfp4 in plain torch (arXiv 2509.25149).

Elements are E2M1 with one E4M3 scale per 16 elements, or per 16x16 elements for weights, and one fp32 factor per
matrix. The columnwise copies of inputs and gradients, which only the weight gradient reads, are multiplied by a 16x16
Hadamard matrix with fixed random signs along the tokens, which cancels in the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, spread_scales

_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes of successive E2M1 codes."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the Hadamard transform, those of Transformer Engine."""
_SIZE = 16


def quantize_rows(
    x: Tensor, form: OperandFormat, *, rowwise: bool, columnwise: bool, offsets_e: Tensor | None = None, seed: int = 0
) -> QuantizedTensor:
    """Quantises rows [R, C]; see `Kernels.quantize_rows`. With `offsets_e`, copies the offsets to the host."""
    noise = torch.Generator(x.device).manual_seed(seed) if form.stochastic else None
    parts = [x] if offsets_e is None else _split(x, offsets_e)
    row = column = None
    if rowwise:
        row = _joined([_quantize(part, form, noise) for part in parts], data_dim=0, scales_dim=1)
        if offsets_e is not None:
            row = QuantizedCopy(_padded(row.data, 0, len(x)), _padded(row.scales, 1, len(x)), row.factor)
    if columnwise:
        transforms = [hadamard(_padded(part.T, 1, -(-len(part) // _SIZE) * _SIZE)) for part in parts]
        column = _joined([_quantize(part, form, noise) for part in transforms], data_dim=1, scales_dim=0)
        if offsets_e is not None:
            blocks = len(x) // _SIZE + len(offsets_e)
            data = _padded(column.data, 1, blocks * _SIZE // 2)
            column = QuantizedCopy(data, _padded(column.scales, 0, blocks), column.factor)
    if offsets_e is None:
        row, column = _one_matrix(row), _one_matrix(column)
    return QuantizedTensor.of(row, column, form.block, x.dtype)


def quantize_weight(weight: Tensor, form: OperandFormat, *, columnwise: bool) -> QuantizedTensor:
    """Quantises a weight [O, I] or [e, O, I] in 16x16 blocks; see `Kernels.quantize_weight`."""
    outputs, inputs = weight.shape[-2:]
    whole = F.pad(weight.detach(), (0, -inputs % _SIZE, 0, -outputs % _SIZE))
    codes, scales, factor = _codes(whole, form, None)
    row = QuantizedCopy(pack_e2m1(codes[..., :outputs, :]), scales, factor)
    column = None
    if columnwise:
        column = QuantizedCopy(pack_e2m1(codes.mT[..., :inputs, :]), scales.mT.contiguous(), factor)
    return QuantizedTensor.of(row, column, form.block, weight.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Multiplies every 16 consecutive elements of the last dim by diag(signs) H / 4, in fp32; keeps the dtype."""
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < _SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    matrix = torch.tensor(_SIGNS, device=x.device)[:, None] * matrix / 4
    return (x.detach().float().unflatten(-1, (-1, _SIZE)) @ matrix).flatten(-2).to(x.dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs uint8 codes [..., C], C even, into bytes [..., C / 2]; even elements are in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _quantize(x: Tensor, form: OperandFormat, noise: torch.Generator | None) -> QuantizedCopy:
    codes, scales, factor = _codes(_padded(x, -1, -(-x.shape[-1] // _SIZE) * _SIZE), form, noise)
    return QuantizedCopy(pack_e2m1(codes), scales, factor[None])


def _codes(x: Tensor, form: OperandFormat, noise: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and factor of matrices [..., R, C] whose C, and R for 16x16 blocks, is a multiple of 16."""
    height = form.block[0]
    wide = x.detach().float()
    amax = F.pad(wide.abs(), (0, 1)).amax(dim=-1).amax(dim=-1) if x.shape[-2] else wide.new_zeros(x.shape[:-2])
    scale = (torch.full_like(amax, _LARGEST * _LARGEST_SCALE) / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax == 0) | (scale == 0), 1.0, scale)
    factor = 1 / scale
    block_amax = wide.abs().unflatten(-1, (-1, _SIZE)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))
    if height == 1:
        block_amax = block_amax.mT.contiguous()
    per_code = scale * torch.tensor(1 / _LARGEST, device=x.device)
    scales = (block_amax * per_code[..., None, None]).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    inverse = (1 / (scales.float() * factor[..., None, None])).clamp(max=torch.finfo(torch.float32).max)
    scaled = (wide * spread_scales(inverse, form.block, *x.shape[-2:])).clamp(-_LARGEST, _LARGEST)
    return _round(scaled, noise), scales, factor


def _round(scaled: Tensor, noise: torch.Generator | None) -> Tensor:
    """E2M1 codes of values in [-6, 6]: nearest, ties to even codes; or up with the probability of the fraction."""
    magnitude = scaled.abs()
    steps = torch.tensor(_STEPS, device=scaled.device)
    if noise is None:
        # odd thresholds are inclusive: a tie between codes 1 and 2 becomes 2, between 0 and 1 becomes 0
        above = torch.bucketize(magnitude, steps)
        at_least = torch.bucketize(magnitude, steps, right=True)
        codes = torch.where(at_least % 2 == 0, at_least, above)
    else:
        values = torch.tensor(_MAGNITUDES, device=scaled.device)
        low = (torch.bucketize(magnitude, values, right=True) - 1).clamp(0, 6)
        fraction = (magnitude - values[low]) / (values[low + 1] - values[low])
        draw = torch.rand(scaled.shape, generator=noise, device=scaled.device)
        codes = low + (draw < fraction)
    return (codes + 8 * (scaled < 0)).to(torch.uint8)


def _one_matrix(copy: QuantizedCopy | None) -> QuantizedCopy | None:
    return None if copy is None or copy.factor is None else copy._replace(factor=copy.factor.squeeze(0))


def _split(x: Tensor, offsets_e: Tensor) -> list[Tensor]:
    ends = offsets_e.tolist()
    return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _joined(copies: list[QuantizedCopy], *, data_dim: int, scales_dim: int) -> QuantizedCopy:
    """Concatenates copies along the given dims of data and scales; factors are stacked."""
    factors = [copy.factor for copy in copies if copy.factor is not None]
    data = torch.cat([copy.data for copy in copies], data_dim)
    return QuantizedCopy(data, torch.cat([copy.scales for copy in copies], scales_dim), torch.cat(factors))


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Pads a dim with zeros to `size`."""
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
