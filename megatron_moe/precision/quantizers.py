"""Quantisers of the FP8 and FP4 recipes in plain torch: scales, elements and layout of `QuantizedTensor`.

They give the bytes and scales of Transformer Engine's kernels for finite inputs. Inputs are converted to fp32 first.
Elements are rounded to nearest even and saturate. The stored scale of a block with an inf or nan is nan, so that every
product with it is nan and the step is not applied; in Transformer Engine, the scale would be 1 and inf would become the
largest element.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE, OperandFormat
from megatron_moe.config.registry import ELEMENTS, resolve
from megatron_moe.precision import nvfp4
from megatron_moe.precision.expert_rows import expand_to_rows, largest_magnitude, pad_to_blocks
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, decode_scales, expand_scales

SCALE_DTYPES = MappingProxyType(
    {"fp32": torch.float32, "power of 2": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
)
"""Dtypes of stored scales, by `OperandFormat.scale`."""
_MANTISSA = 0x7FFFFF


def element_dtype(name: str) -> torch.dtype:
    """Dtype in which elements of a registered format are stored; a byte has two E2M1 elements."""
    dtype: torch.dtype = resolve(ELEMENTS.get(name).dtype)
    return dtype


def quantize_rows(
    x: Tensor,
    fmt: OperandFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    offsets_e: Tensor | None = None,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedTensor:
    """Implements `Kernels.quantize_rows`."""
    row = column = None
    if fmt.element == "e2m1":
        return nvfp4.quantize_rows(x, fmt, rowwise=rowwise, columnwise=columnwise, offsets_e=offsets_e, seed=seed)
    if fmt.block == WHOLE:
        if scale is None:
            scale = tensor_scale(x, fmt, offsets_e)
        per_row = scale if offsets_e is None else expand_to_rows(scale, offsets_e, len(x))[:, None]
        data = cast(x.float() * per_row, fmt.element)
        row = QuantizedCopy(data, 1 / scale)
        column = QuantizedCopy(data.T.contiguous(), 1 / scale)
        return QuantizedTensor(row if rowwise else None, column if columnwise else None, fmt.block, x.dtype)
    if rowwise:
        row = quantize_copy(x, fmt)
    if columnwise:
        by_block = x if offsets_e is None else pad_to_blocks(x, offsets_e, fmt.block[1])[0]
        column = quantize_copy(by_block.T, fmt)
    return QuantizedTensor(row, column, fmt.block, x.dtype)


def quantize_weight(
    weight: Tensor,
    fmt: OperandFormat,
    *,
    columnwise: bool,
    scale: Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Implements `Kernels.quantize_weight`."""
    made = _quantize_weight(weight, fmt, columnwise=columnwise, scale=scale)
    return made if out is None else out.copy_(made)


def _quantize_weight(weight: Tensor, fmt: OperandFormat, *, columnwise: bool, scale: Tensor | None) -> QuantizedTensor:
    column: QuantizedCopy | None
    if fmt.element == "e2m1":
        return nvfp4.quantize_weight(weight, fmt, columnwise=columnwise)
    if fmt.block == WHOLE:
        if scale is None:
            scale = quantization_scale(weight.detach().abs().float().amax(dim=(-2, -1)), fmt, weight.dtype)
        row = QuantizedCopy(cast(weight.float() * scale[..., None, None], fmt.element), 1 / scale)
        column = QuantizedCopy(row.data.mT.contiguous(), row.scales)
    else:
        row = quantize_copy(weight, fmt)
        if fmt.block[0] == 1:
            column = quantize_copy(weight.mT, fmt) if columnwise else None
        else:
            column = QuantizedCopy(row.data.mT.contiguous(), row.scales.mT.contiguous())
    return QuantizedTensor(row, column if columnwise else None, fmt.block, weight.dtype)


def quantize_copy(x: Tensor, fmt: OperandFormat) -> QuantizedCopy:
    """Quantises a matrix [..., R, C] in blocks that extend along its last dim. Incomplete blocks are treated as padded
    with 0."""
    height, width = fmt.block
    num_rows, num_columns = x.shape[-2:]
    wide = x.detach().float()
    padded = F.pad(wide, (0, -num_columns % width, 0, -num_rows % height))
    amax = padded.abs().unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))
    if height == 1:
        amax = amax.mT.contiguous()
    factors, scales = block_scales(amax, fmt, x.dtype)
    data = cast(wide * expand_scales(factors, fmt.block, num_rows, num_columns), fmt.element)
    return QuantizedCopy(data, scales)


def block_scales(amax: Tensor, fmt: OperandFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (fp32 multipliers of the elements, scales to store) of FP8 blocks with the largest magnitudes `amax`
    (fp32). `dtype`: dtype of the tensor."""
    if fmt.scale == "e8m0":
        exponents = _e8m0(amax, fmt.element)
        return decode_scales(254 - exponents), exponents
    factors = quantization_scale(amax, fmt, dtype)
    return factors.nan_to_num(1.0), 1 / factors


def _e8m0(amax: Tensor, element: str) -> Tensor:
    """E8M0 exponents of amax / largest number of the format, rounded up, uint8. inf and nan give 255 (nan)."""
    ratio = amax * torch.full((), 1 / ELEMENTS.get(element).largest, device=amax.device)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    # 2^-127 is the smallest scale; its bits are those of a subnormal number
    rounds_up = (mantissa > torch.where(exponent == 0, 1 << 22, 0)) & (exponent < 254)
    return torch.where(ratio.isfinite(), exponent + rounds_up.int(), 255).to(torch.uint8)


def tensor_scale(x: Tensor, fmt: OperandFormat, offsets_e: Tensor | None = None) -> Tensor:
    """Scale of a whole matrix [R, C], a scalar; with `offsets_e`, the scale of each expert's rows, [e]."""
    return quantization_scale(largest_magnitude(x, offsets_e), fmt, x.dtype)


def quantization_scale(amax: Tensor, fmt: OperandFormat, dtype: torch.dtype) -> Tensor:
    """fp32 factor by which elements with the largest magnitude `amax` (fp32) are multiplied before the cast.

    1 for an amax of 0, nan for inf or nan. `dtype`: dtype of the tensor; its largest number replaces an infinite scale.
    """
    scale = (
        torch.full_like(amax, ELEMENTS.get(fmt.element).largest) / amax
    )  # `number / tensor` rounds twice: it multiplies by the reciprocal
    bound = torch.finfo(torch.float32 if fmt.block == WHOLE or dtype == torch.float64 else dtype).max
    scale = torch.where(scale.isinf(), bound, scale)
    if fmt.scale == "power of 2":
        scale = (scale.view(torch.int32) & ~_MANTISSA).view(torch.float32)
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def cast(scaled: Tensor, element: str) -> Tensor:
    """Rounds fp32 values [..., C] to nearest, with saturation. E2M1 elements are packed, [..., C / 2]."""
    if element == "e2m1":
        return nvfp4.encode(scaled)
    entry = ELEMENTS.get(element)
    clamped = scaled.clamp(-entry.largest, entry.largest)
    return (clamped.round() if entry.is_integer else clamped).to(element_dtype(element))
