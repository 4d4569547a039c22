"""Formats of low-precision optimizer state, defined in plain torch.

- plain: unscaled values in the dtype of the tensor.
- fp16, fp8 (e4m3, stored as uint8): each block of 128 elements is scaled by a power of two, so that its values use the
  whole range of the format. The second moment is stored as its square root, which halves the range of exponents.
  Nonzero square roots never round to zero, because AdamW divides by them.
- remainder: difference of the fp32 bit patterns of a master weight and its bf16 rounding (the parameter), as int16. The
  fp32 value is restored exactly from the parameter and the difference. The difference always fits in int16, because all
  implementations of the optimizer round weights to nearest with ties away from zero.

fp8 values are rounded stochastically. Otherwise, a moving average whose change per step is less than half the spacing
of fp8 values would never change. The random number is a hash of element index, step and salt (see `precision.dither`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 128
"""Number of elements that share a scale."""
LEAST_EXPONENT = -100
"""Minimum exponent of a scale. Blocks whose values are so small that they need a lower exponent lose precision."""
FIRST_SALT, SECOND_SALT = 0, 1
"""Hash salts of the first and the second moment, so that the random numbers of the two moments differ."""

Format = Literal["plain", "fp16", "fp8", "remainder"]


@dataclass(frozen=True)
class PackedState:
    """Flat optimizer state tensor of n elements in one of the formats of this module."""

    format: Format
    data: Tensor
    """Stored values [n]: uint8 for fp8, int16 for remainder, fp16 for fp16, any floating dtype for plain."""
    exponents: Tensor | None = None
    """Exponents of the block scales 2^exponent, int8 [ceil(n / 128)], for fp16 and fp8; None for other formats."""
    root: bool = False
    """True if `data` * block scale is the square root of the value (fp16 and fp8 only), False if it is the value."""

    @classmethod
    def zeros(cls, size: int, name: Format, dtype: torch.dtype, device: torch.device, *, root: bool) -> "PackedState":
        """Creates a state of zeros in format `name`. Only the plain format uses `dtype`."""
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
        """Tensors that store the state: data and, for fp16 and fp8, exponents."""
        return (self.data,) if self.exponents is None else (self.data, self.exponents)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, start: int, end: int) -> "PackedState":
        """View of the elements from `start` to `end` (exclusive). `start` must be a multiple of the block size, 128."""
        assert start % BLOCK == 0, f"element {start} is not the beginning of a block"
        blocks = None if self.exponents is None else self.exponents[start // BLOCK : -(-end // BLOCK)]
        return PackedState(self.format, self.data[start:end], blocks, self.root)

    def new_empty(self, device: torch.device) -> "PackedState":
        """Uninitialised state of the same size and format on another device."""
        data, *exponents = (torch.empty_like(part, device=device) for part in self.parts)
        return PackedState(self.format, data, exponents[0] if exponents else None, self.root)


def unpack(packed: PackedState, weights: Tensor | None = None) -> Tensor:
    """Dequantises a state to fp32; the format "plain" returns `data` without a copy. The format "remainder" needs
    `weights`, the bf16 parameters [n] that contain the high 16 bits."""
    match packed.format:
        case "plain":
            return packed.data
        case "remainder":
            assert weights is not None, "format 'remainder' needs the weights"
            return ((weights.view(torch.int16).to(torch.int32) << 16) + packed.data.to(torch.int32)).view(torch.float32)
    assert packed.exponents is not None, "a scaled format needs exponents"
    values = packed.data if packed.format == "fp16" else _from_e4m3(packed.data)
    scales, whole = _power_of_two(packed.exponents.to(torch.int32)), packed.size // BLOCK * BLOCK
    wide = torch.empty(packed.size, dtype=torch.float32, device=values.device)
    # one kernel converts and multiplies
    torch.mul(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None], out=wide[:whole].view(-1, BLOCK))
    torch.mul(values[whole:], scales[whole // BLOCK :], out=wide[whole:])
    return wide.square() if packed.root else wide


def pack(values: Tensor, like: PackedState, weights: Tensor | None = None, dither: Tensor | None = None) -> PackedState:
    """Packs values in the format of the state `like`.

    Args:
        values: [n] in fp32; any dtype for the plain format.
        weights: result of `round_weights` for `values`, bf16 [n]; for remainders only.
        dither: fp32 [n] in [0, 1), for fp8 only. It is added to each value, in units of the last place, and the sum is
            rounded down. If it is None, values are rounded to nearest.
    """
    match like.format:
        case "plain":
            return PackedState("plain", values.to(like.data.dtype))
        case "remainder":
            assert weights is not None, "format 'remainder' needs the weights"
            rest = values.view(torch.int32) - (weights.view(torch.int16).to(torch.int32) << 16)
            return PackedState("remainder", rest.to(torch.int16))
    wide = values.sqrt() if like.root else values
    narrow = like.format == "fp8"
    exponents = _exponents(wide, *((8, 0x600000) if narrow else (15, 0x7FE000)))
    scaled = wide * _power_of_two(-exponents).repeat_interleave(BLOCK)[: wide.numel()]
    data = _to_e4m3(scaled, dither) if narrow else scaled.to(torch.float16)
    if like.root:
        data = torch.where((data == 0) & (wide > 0), 1 if narrow else 2.0**-24, data)
    return PackedState(like.format, data, exponents.to(torch.int8), like.root)


def round_weights(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds weights to `dtype`. From fp32 to bf16, ties round away from zero; otherwise torch's rounding is used."""
    if (values.dtype, dtype) != (torch.float32, torch.bfloat16):
        return values.to(dtype)
    away = ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), values.to(dtype), away)


def _exponents(wide: Tensor, top: int, mantissa: int) -> Tensor:
    """Exponents of the block scales, int32 [ceil(n / 128)]. Each exponent is the smallest for which no value of the
    block, divided by the scale, exceeds the largest number of the format, 2^top * (1 + mantissa / 2^23)."""
    size = wide.numel()
    blocks = -(-size // BLOCK)
    padded = torch.nn.functional.pad(wide.abs(), (0, blocks * BLOCK - size))
    largest = padded.view(blocks, BLOCK).amax(dim=1).view(torch.int32)
    return (((largest + (0x7FFFFF - mantissa)) >> 23) - 127 - top).clamp(min=LEAST_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Returns 2^exponent in fp32 for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _from_e4m3(codes: Tensor) -> Tensor:
    """Converts e4m3 codes in uint8 to fp32. Codes of nan (low seven bits all ones) must not occur."""
    codes = codes.to(torch.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (mantissa + 8) * _power_of_two(exponent - 10))
    return torch.where(codes > 127, -size, size)


def _to_e4m3(scaled: Tensor, dither: Tensor | None) -> Tensor:
    """Converts fp32 values of magnitude up to 448 to e4m3 codes in uint8. `dither`: see `pack`."""
    size = scaled.abs()
    exponent = ((size.view(torch.int32) >> 23) - 127).clamp(min=-6)
    units = size * _power_of_two(3 - exponent)
    number = torch.floor(units + (0.5 if dither is None else dither)).to(torch.int32)
    codes = (number + (exponent + 6) * 8).clamp(max=126)
    return torch.where(scaled < 0, codes + 128, codes).to(torch.uint8)
