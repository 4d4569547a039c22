"""How the wrappers of kernels read tensors and cut work into programs."""

from torch import Tensor

MOST_PROGRAMS = 4 * 132
"""Partial sums of a weight's gradient: four for each multiprocessor of a Hopper GPU, but no more than tiles."""


def rows_of(x: Tensor) -> Tensor:
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
