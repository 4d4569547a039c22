"""Named random streams. A draw depends on what it is for, never on how many draws came before it or on which rank.

So initial weights do not change with the layout, a recomputed dropout mask is the first one again, and ranks can be
threads of one process.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.parallel.param_meta import Part

Key = tuple[int | str, ...]


class RNGKey(NamedTuple):
    """Start of the keys of all random draws of one microbatch."""

    seed: int
    """Seed of the run."""
    iteration: int
    microbatch: int
    """Index in the global batch, so that draws do not depend on the number of data-parallel ranks."""
    scope: Key = ()
    """Distinguishes parts of the microbatch: context-parallel rank, depth of multi-token prediction."""

    def site(self, *names: int | str) -> Key:
        """Key of the draws of one site, such as "embedding" or the path of a layer."""
        return (self.seed, self.iteration, self.microbatch, *self.scope, *names)

    def within(self, *scope: int | str) -> "RNGKey":
        """The key with a longer scope."""
        return self._replace(scope=(*self.scope, *scope))


def seed_of(key: Key) -> int:
    """A 63-bit seed that depends on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one draw, e.g. `generator((seed, "decoder.layers.3.mlp.router.weight"))`. Tensors without
    data take the CPU's."""
    where = torch.device(device)
    return torch.Generator("cpu" if where.type == "meta" else where).manual_seed(seed_of(key))


def uniform(shape: torch.Size, key: Key, device: torch.device, *, dim: int = 0, part: Part = (0, 1)) -> Tensor:
    """fp32 numbers in [0, 1) for a tensor that is part (index, number) of a larger one, cut along `dim` into equal
    parts.

    The numbers of the larger one are drawn and cut, so they do not depend on how it is cut; that costs `number` times
    the draws of one part.
    """
    drawn = torch.rand(_whole(shape, dim, part), device=device, generator=generator(key, device))
    return _part(drawn, shape, dim, part)


def normal(shape: torch.Size, key: Key, device: torch.device, *, dim: int = 0, part: Part = (0, 1)) -> Tensor:
    """As `uniform`, standard normal numbers."""
    drawn = torch.randn(_whole(shape, dim, part), device=device, generator=generator(key, device))
    return _part(drawn, shape, dim, part)


def dropout(x: Tensor, p: float, key: Key | None, *, dim: int = 0, part: Part = (0, 1)) -> Tensor:
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p). `key` None: evaluation, no dropout.

    `x` is `part` (index, number) of a larger tensor that is cut along `dim`; the mask is cut from the larger one's.
    """
    if key is None or p == 0.0:
        return x
    keep = uniform(x.shape, key, x.device, dim=dim, part=part) >= p
    return x * keep.to(x.dtype) / (1.0 - p)


def _whole(shape: torch.Size, dim: int, part: Part) -> list[int]:
    whole = list(shape)
    whole[dim] *= part[1]
    return whole


def _part(drawn: Tensor, shape: torch.Size, dim: int, part: Part) -> Tensor:
    return drawn if part[1] == 1 else drawn.narrow(dim, part[0] * shape[dim], shape[dim])
