"""Random numbers of stochastic rounding: hashes of indices and a seed in device memory, as CUDA graphs require."""

import math

import torch
from torch import Tensor


def dither(size: int, step: Tensor, salt: int, first: int, device: torch.device) -> Tensor:
    """Random multiples of 2^-16 in [0, 1), fp32 [size]. Element i is a hash of the index `first` + i, step and salt."""
    number = torch.arange(first, first + size, device=device, dtype=torch.int64)
    mixed = (number * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA77 + salt * 0xC2B2AE3D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return (mixed >> 16).to(torch.float32) * 2.0**-16


class Noise:
    """Random numbers in [0, 1) by consecutive indices."""

    def __init__(self, seed: Tensor) -> None:
        """`seed`: int64 []."""
        self._seed = seed
        self._num_drawn = 0

    def draw(self, shape: torch.Size) -> Tensor:
        """The next numbers, fp32 [*shape] on the device of the seed."""
        size, first = math.prod(shape), self._num_drawn
        self._num_drawn += size
        return dither(size, self._seed, 0, first, self._seed.device).view(shape)
