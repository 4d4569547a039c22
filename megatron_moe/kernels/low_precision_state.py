"""Formats of low-precision optimizer state, defined in plain torch.

- plain: the numbers themselves, in their tensor's dtype.
- fp16, fp8 (e4m3, kept as bytes): blocks of 128 elements, each with a power of two as its scale, so that a block uses
  the whole range of the format. The second moment is kept as its square root, which has half the range, and what is
  above zero stays above zero: a step divides by it.
- remainder: the 16 low bits of an fp32 number whose bf16 rounding is stored elsewhere (the parameter). Both together
  are the number, bit for bit. That needs an invertible rounding: to nearest, ties away from zero. All forms of the
  optimizer round weights in this way.

fp8 numbers are rounded stochastically: an average that changes by less than half a unit per step would otherwise not
change at all. The random number is a hash of element and step.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale."""
LEAST_EXPONENT = -100
"""Smallest exponent of a scale: blocks of smaller numbers lose digits."""
FIRST_SALT, SECOND_SALT = 0, 1
"""Salts that make the random numbers of the two moments of one element differ."""

Format = Literal["plain", "fp16", "fp8", "remainder"]


@dataclass(frozen=True)
class PackedState:
    """A flat state of n numbers."""

    format: Format
    data: Tensor
    """[n]: any floating dtype (plain), fp16, uint8 (fp8) or int16 (remainder)."""
    exponents: Tensor | None = None
    """[ceil(n / 128)] int8 of fp16 and fp8: a number is its data times 2^exponent."""
    root: bool = False
    """fp16 and fp8: data and scale give the square root of a number."""

    @classmethod
    def zeros(cls, size: int, name: Format, dtype: torch.dtype, device: torch.device, *, root: bool) -> "PackedState":
        """`dtype`: of the plain format."""
        dtypes = {"plain": dtype, "fp16": torch.float16, "fp8": torch.uint8, "remainder": torch.int16}
        data = torch.zeros(size, dtype=dtypes[name], device=device)
        if name not in ("fp16", "fp8"):
            return cls(name, data)
        return cls(name, data, torch.zeros(-(-size // BLOCK), dtype=torch.int8, device=device), root)

    @property
    def size(self) -> int:
        return self.data.numel()

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it is made of."""
        return (self.data,) if self.exponents is None else (self.data, self.exponents)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, start: int, end: int) -> "PackedState":
        """A view of elements `start` to `end`; `start` begins a block."""
        assert start % BLOCK == 0, f"element {start} is inside of a block"
        blocks = None if self.exponents is None else self.exponents[start // BLOCK : -(-end // BLOCK)]
        return PackedState(self.format, self.data[start:end], blocks, self.root)

    def like(self, device: torch.device) -> "PackedState":
        """Room for the same on another device."""
        data, *exponents = (torch.empty_like(part, device=device) for part in self.parts)
        return PackedState(self.format, data, exponents[0] if exponents else None, self.root)


def unpack(packed: PackedState, weights: Tensor | None = None) -> Tensor:
    """The numbers: plain ones as they are (no copy), others in fp32. `weights`: bf16 [n], of remainders."""
    match packed.format:
        case "plain":
            return packed.data
        case "remainder":
            assert weights is not None, "remainders without their weights"
            return ((weights.view(torch.int16).to(torch.int32) << 16) + packed.data.to(torch.int32)).view(torch.float32)
        case "fp16":
            wide = packed.data.to(torch.float32)
        case "fp8":
            wide = _from_e4m3(packed.data)
    assert packed.exponents is not None, "numbers without scales"
    wide = wide * _per_element(_power_of_two(packed.exponents.to(torch.int32)), packed.size)
    return wide.square() if packed.root else wide


def pack(
    numbers: Tensor, like: PackedState, weights: Tensor | None = None, dither: Tensor | None = None
) -> PackedState:
    """Converts numbers to the format of another state.

    Args:
        numbers: [n], fp32; of the plain format any.
        weights: bf16 [n], of remainders: the rounded numbers.
        dither: fp32 [n] in [0, 1), of fp8: rounds up what is above 1 minus it; None: to the nearest.
    """
    match like.format:
        case "plain":
            return PackedState("plain", numbers.to(like.data.dtype))
        case "remainder":
            assert weights is not None, "remainders without their weights"
            rest = numbers.view(torch.int32) - (weights.view(torch.int16).to(torch.int32) << 16)
            return PackedState("remainder", rest.to(torch.int16))
    wide = numbers.sqrt() if like.root else numbers
    narrow = like.format == "fp8"
    exponents = _exponents(wide, *((8, 0x600000) if narrow else (15, 0x7FE000)))
    scaled = wide * _per_element(_power_of_two(-exponents), wide.numel())
    data = _to_e4m3(scaled, dither) if narrow else scaled.to(torch.float16)
    if like.root:
        data = torch.where((data == 0) & (wide > 0), 1 if narrow else 2.0**-24, data)
    return PackedState(like.format, data, exponents.to(torch.int8), like.root)


def round_weights(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in `dtype`: from fp32 to bf16 to the nearest, ties away from zero; else as torch rounds."""
    if (numbers.dtype, dtype) != (torch.float32, torch.bfloat16):
        return numbers.to(dtype)
    away = ((numbers.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(numbers.isnan(), numbers.to(dtype), away)


def dither(size: int, step: Tensor, salt: int, first: int, device: torch.device) -> Tensor:
    """fp32 [size] in [0, 1), multiples of 2^-16: a hash of element number (`first`, first + 1, ...), step and salt."""
    number = torch.arange(first, first + size, device=device, dtype=torch.int64)
    mixed = (number * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA77 + salt * 0xC2B2AE3D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return (mixed >> 16).to(torch.float32) * 2.0**-16


def _exponents(wide: Tensor, top: int, mantissa: int) -> Tensor:
    """int32 [ceil(n / 128)]: the smallest power of two that brings a block's largest number to at most 2^top times
    (1 + mantissa / 2^23), the largest number of the format. Numbers that were packed before get a scale that holds them
    exactly."""
    size = wide.numel()
    blocks = -(-size // BLOCK)
    padded = torch.nn.functional.pad(wide.abs(), (0, blocks * BLOCK - size))
    largest = padded.view(blocks, BLOCK).amax(dim=1).view(torch.int32)
    return (((largest + (0x7FFFFF - mantissa)) >> 23) - 127 - top).clamp(min=LEAST_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """fp32 from int32 between -126 and 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _per_element(scales: Tensor, size: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:size]


def _from_e4m3(codes: Tensor) -> Tensor:
    """uint8 -> fp32. Seven ones, not a number in e4m3, never occur."""
    codes = codes.to(torch.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (mantissa + 8) * _power_of_two(exponent - 10))
    return torch.where(codes > 127, -size, size)


def _to_e4m3(scaled: Tensor, dither: Tensor | None) -> Tensor:
    """fp32 of at most 448 -> uint8."""
    size = scaled.abs()
    exponent = ((size.view(torch.int32) >> 23) - 127).clamp(min=-6)
    units = size * _power_of_two(3 - exponent)
    number = torch.floor(units + (0.5 if dither is None else dither)).to(torch.int32)
    codes = (number + (exponent + 6) * 8).clamp(max=126)
    return torch.where(scaled < 0, codes + 128, codes).to(torch.uint8)
