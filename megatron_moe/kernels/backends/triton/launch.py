"""What all Triton wrappers share: how tensors are read as rows, and how work is cut into programs."""

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run on the CPU, for tests; there the product of two bf16 matrices is wrong, so factors are widened."""


def rows_of(x: Tensor) -> Tensor:
    """[..., W] as a matrix [rows, W] whose rows are contiguous inside; a copy only where no view is one."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return int(triton.next_power_of_2(max(number, 1)))


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few on the CPU, where the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
