"""Random numbers of stochastic rounding: hashes with a seed in device memory, so that CUDA graphs can be replayed."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def dither(size: int, step: Tensor, salt: int, first: int, device: torch.device) -> Tensor:
    """Random multiples of 2^-16 in [0, 1), fp32 [size]. Element i is a hash of the index `first` + i, step and salt."""
    number = torch.arange(first, first + size, device=device, dtype=torch.int64)
    mixed = _mix(number * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA77 + salt * 0xC2B2AE3D)
    return (mixed >> 16).to(torch.float32) * 2.0**-16


def block_dither(x: Tensor, length: int, seed: Tensor) -> Tensor:
    """Random multiples of 2^-16 in [0, 1) for the elements of fp32 x [..., C], in blocks of `length` of the last dim.

    A number is a hash of all values of the element's block, the element's position in the block, and `seed` (int64 []).
    It depends neither on the position of the block in the tensor nor on the rank, so it is the same in every parallel
    layout. Blocks with equal values get equal numbers."""
    place = (torch.arange(length, device=x.device) * 0x9E3779B1).to(torch.int32)
    bits = (x + 0.0).view(torch.int32).unflatten(-1, (-1, length))  # + 0.0 converts -0 to 0
    blocks = _mix32_(bits.mul_(0xC2B2AE3D - 2**32).add_(place)).sum(dim=-1, keepdim=True)  # the sum is int64
    mixed = _mix32_(_mix(blocks + seed * 0x85EBCA77).to(torch.int32) + place)
    return (mixed >> 16).bitwise_and_(0xFFFF).flatten(-2).to(torch.float32).mul_(2.0**-16)


def _mix32_(number: Tensor) -> Tensor:
    """In-place `_mix` of int32 numbers, which halves the memory traffic; the hash is stored as int32 bits."""
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        number.bitwise_xor_((number >> shift).bitwise_and_(_MASK >> shift)).mul_(factor)
    return number


def _mix(number: Tensor) -> Tensor:
    """Hash of the low 32 bits of int64 numbers, in [0, 2^32)."""
    mixed = number & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & _MASK
    return ((mixed ^ (mixed >> 12)) * 0x297A2D39) & _MASK
