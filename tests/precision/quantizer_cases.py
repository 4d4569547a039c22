"""Tensors on which the quantisers are compared with Transformer Engine's Python references, and digests of results."""

import hashlib
from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from torch import Tensor

SHAPES = ((256, 384), (130, 272), (16, 16), (300, 1040))
KINDS = ("wide", "narrow", "zeros")
RECIPES = (
    *(f"blockwise {block} {element} {scale}" for block, element, scale in product(
        ("1x128", "128x128"), ("e4m3", "e5m2"), ("pow2", "fp32")
    )),
    "tensorwise e4m3",
    "tensorwise e5m2",
    "nvfp4 1x16",
    "nvfp4 16x16",
)  # fmt: skip


def cases() -> list[tuple[str, str, tuple[int, int], str, torch.dtype]]:
    """(name, recipe, shape, kind of content, dtype) of every case."""
    return [
        (f"{recipe}, {shape[0]}x{shape[1]}, {kind}, {str(dtype).removeprefix('torch.')}", recipe, shape, kind, dtype)
        for recipe, shape, kind, dtype in product(RECIPES, SHAPES, KINDS, (torch.bfloat16, torch.float32))
        if not recipe.startswith("nvfp4") or (shape[0] % 16 == 0 and dtype == torch.bfloat16)
    ]


def make_input(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> Tensor:
    """Numbers derived from integers, so that they are equal on every machine: magnitudes of at least 2^-130 ("wide"),
    around 1 ("narrow"), or mostly 0 ("zeros")."""
    random = np.random.Generator(np.random.PCG64(shape[0] * 1000 + len(kind)))
    digits = 7 if dtype == torch.bfloat16 else 23
    mantissa = random.integers(-(1 << digits), 1 << digits, shape).astype(np.float64)
    exponent = random.integers(-130, 12, shape) if kind == "wide" else random.integers(-6, 2, shape)
    values = np.ldexp(mantissa, exponent - digits)
    if kind == "zeros":
        values *= random.integers(0, 40, shape) == 0
        values[: shape[0] // 2] = 0
    return torch.from_numpy(values).float().to(dtype)


def digests(parts: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and checksum of the bytes of every tensor."""
    return {
        name: f"{tuple(part.shape)} "
        + hashlib.sha256(part.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]
        for name, part in parts.items()
    }
