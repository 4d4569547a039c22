"""Plain-torch definition of FP8 block quantisation, and of products of the quantised values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor
from tests.helpers.tolerances import EXACT

BLOCK = 128


def quantized(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Elements of x [..., R, C], and inverse scales [..., ceil(R / block rows), ceil(C / block columns)]."""
    height, width = block
    num_rows, num_columns = x.shape[-2:]
    wide, largest = x.float(), torch.finfo(dtype).max
    padded = F.pad(wide, (0, -num_columns % width, 0, -num_rows % height))
    amax = padded.abs().unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))
    # largest / amax would round differently, because torch computes it as amax.reciprocal() * largest
    scale = torch.full_like(amax, largest).div(amax).clamp(max=torch.finfo(x.dtype).max)
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.frexp(scale)[1] - 1.0).double()).float()
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    spread = scale.repeat_interleave(height, -2)[..., :num_rows, :].repeat_interleave(width, -1)[..., :num_columns]
    inverse = torch.where(amax.isfinite(), 1 / scale, torch.nan)
    return (wide * spread).clamp(-largest, largest).to(dtype), inverse


def quantized_rows(x_RC: Tensor, ends: list[int] | None = None, **fmt: object) -> QuantizedTensor:
    """Both copies of x [R, C] in blocks of 1x128. `ends`: end of each expert's rows; the blocks of the columnwise copy
    then start at multiples of 128 columns, the gaps are 0, and there are as many blocks as the experts need."""
    rowwise, scales = quantized(x_RC, (1, BLOCK), **fmt)  # type: ignore[arg-type]
    parts = [x_RC] if ends is None else [x_RC[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    if ends is not None:
        parts = [F.pad(part, (0, 0, 0, -len(part) % BLOCK)) for part in parts]
    columns = [quantized(part.T.contiguous(), (1, BLOCK), **fmt) for part in parts]  # type: ignore[arg-type]
    column = QuantizedCopy(torch.cat([q for q, _ in columns], 1), torch.cat([s.T for _, s in columns]))
    return QuantizedTensor(QuantizedCopy(rowwise, scales.T.contiguous()), column, (1, BLOCK))


def quantized_weight(weight: Tensor, **fmt: object) -> QuantizedTensor:
    """Quantises both copies of a weight [..., O, I] in blocks of 128x128."""
    rowwise, scales = quantized(weight, (BLOCK, BLOCK), **fmt)  # type: ignore[arg-type]
    column = QuantizedCopy(rowwise.mT.contiguous(), scales.mT.contiguous())
    return QuantizedTensor(QuantizedCopy(rowwise, scales), column, (BLOCK, BLOCK))


def values_of_rows(x: QuantizedTensor) -> Tensor:
    """fp64 values [R, C] of the rowwise copy of rows in blocks of 1x128."""
    data, scales, _ = x.row_copy
    return data.double() * scales.T.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def values_of_weight(x: QuantizedTensor) -> Tensor:
    """fp64 values [..., O, I] of the rowwise copy of weights in blocks of 128x128."""
    data, scales, _ = x.row_copy
    outputs, inputs = data.shape[-2:]
    per_element = scales.double().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return data.double() * per_element[..., :outputs, :inputs]


def same_elements(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Asserts equal FP8 elements, bit for bit; NaN equals NaN of any sign."""
    assert actual is not None and expected is not None
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, f"{what}: {actual.shape}"
    same = actual.view(torch.uint8) == expected.view(torch.uint8)
    same |= actual.float().isnan() & expected.float().isnan()
    wrong = same.logical_not().nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {same.numel()} elements differ, the first at {wrong[0].tolist()}"


def same_scales(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Asserts equal scales. Scales of blocks with an inf or NaN must be NaN."""
    assert actual is not None and expected is not None
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other blocks"
    EXACT.check(actual.nan_to_num(-1.0), expected.nan_to_num(-1.0), what)
