"""Keyed random numbers: a draw depends only on its key, not on the rank or on earlier draws.

Initial weights are therefore the same for all parallel sizes, recomputation repeats the dropout mask of the forward,
and ranks can be threads of one process.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.param_meta import Part

Key = tuple[int | str, ...]


class RNGKey(NamedTuple):
    """Common prefix of the keys of all random draws in one microbatch."""

    seed: int
    """Seed of the run."""
    iteration: int
    microbatch: int
    """Index of the microbatch in the global batch; independent of the number of data-parallel ranks."""
    scope: Key = ()
    """Key parts that distinguish draws of one microbatch: context-parallel rank, depth of multi-token prediction."""

    def draw_key(self, *names: int | str) -> Key:
        """Key of the draws at one site of the model, such as "embedding" or the name of a layer."""
        return (self.seed, self.iteration, self.microbatch, *self.scope, *names)

    def with_scope(self, *scope: int | str) -> "RNGKey":
        """Returns a copy of this key with the arguments appended to `scope`."""
        return self._replace(scope=(*self.scope, *scope))


def seed_from_key(key: Key) -> int:
    """Computes a 63-bit seed that depends on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """New generator for one draw, seeded by `key`. For the meta device, returns a CPU generator."""
    where = torch.device(device)
    return torch.Generator("cpu" if where.type == "meta" else where).manual_seed(seed_from_key(key))


def uniform(shape: torch.Size, key: Key, device: torch.device, *, dim: int = 0, part: Part = (0, 1)) -> Tensor:
    """Uniform fp32 numbers in [0, 1) for a tensor, or for one of several equal shards of it along `dim`.

    `part` is (index of the shard, number of shards), and `shape` is the shape of the shard. The whole tensor is drawn
    and then sliced, so the numbers do not depend on the sharding.
    """
    return _draw(torch.rand, shape, key, device, dim, part)


def normal(shape: torch.Size, key: Key, device: torch.device, *, part: Part = (0, 1)) -> Tensor:
    """Standard normal fp32 numbers for a tensor or one shard of its dim 0. The arguments are those of `uniform`."""
    return _draw(torch.randn, shape, key, device, 0, part)


def dropout(x: Tensor, p: float, key: Key | None, *, dim: int = 0, part: Part = (0, 1)) -> Tensor:
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p). If `key` is None, returns `x`.

    `part` is (index of the shard, number of shards): `x` is this shard, along `dim`, of a larger tensor. The mask is
    sliced from the mask of the whole tensor, so it does not depend on the sharding."""
    if key is None or p == 0.0:
        return x
    keep = uniform(x.shape, key, x.device, dim=dim, part=part) >= p
    return x * keep.to(x.dtype) / (1.0 - p)


def _draw(
    sample: Callable[..., Tensor], shape: torch.Size, key: Key, device: torch.device, dim: int, part: Part
) -> Tensor:
    whole = list(shape)
    whole[dim] *= part[1]
    drawn = sample(whole, device=device, generator=generator(key, device))
    return drawn if part[1] == 1 else drawn.narrow(dim, part[0] * shape[dim], shape[dim])
