"""Named random streams. A draw depends on what it is for, never on how many draws came before it or on which rank.

So initial weights do not change with the layout, a recomputed dropout mask is the first one again, and ranks can be
threads of one process.
"""

import hashlib

import torch
from torch import Tensor

Key = tuple[int | str, ...]


def seed_of(key: Key) -> int:
    """A 63-bit seed that depends on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one draw, e.g. `generator((seed, "decoder.layers.3.mlp.router.weight"))`."""
    return torch.Generator(device=device).manual_seed(seed_of(key))


def dropout(x: Tensor, p: float, key: Key | None) -> Tensor:
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p). `key` None: evaluation, no dropout."""
    if key is None or p == 0.0:
        return x
    keep = torch.rand(x.shape, device=x.device, generator=generator(key, x.device)) >= p
    return x * keep.to(x.dtype) / (1.0 - p)
