"""Where every parameter lives in the flat buffers. Pure maths, no torch.

Parameters that are reduced over the same ranks and stepped with the same hyperparameters share a flat buffer, so that
the norm, the reduction and the optimizer step are one kernel per buffer. Inside a buffer they stand in reverse order of
registration, which is about the order in which a backward pass finishes them, and are cut into buckets: the unit of a
collective. Starts and bucket ends are aligned so that a bucket divides into equal shards for its data-parallel ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from megatron_moe.specs.params import Grid, ParamMeta
from megatron_moe.specs.precision import FloatName
from megatron_moe.specs.train import OptimizerSpec

ELEMENT_ALIGN = 64
"""Every parameter starts at a multiple of this many elements."""
BUCKET_ALIGN = 128
"""Every bucket ends at a multiple of this and of its number of shards."""


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """One parameter as this rank holds it."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    dtype: FloatName
    meta: ParamMeta

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BufferKey:
    """What parameters of one buffer have in common."""

    grid: Grid
    dtype: FloatName
    router: bool
    """Gate matrices, whose gradient norm is reported apart."""
    decay: bool
    decoupled_lr: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """One parameter in a buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    bucket: int

    @property
    def end(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """One flat buffer, in elements. What lies between the places is padding and stays zero."""

    key: BufferKey
    size: int
    places: tuple[Place, ...]
    buckets: tuple[tuple[int, int], ...]
    """(start, end) of every bucket; together they cover the buffer."""

    @property
    def padding(self) -> int:
        return self.size - sum(place.end - place.start for place in self.places)


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """All buffers of one rank."""

    buffers: tuple[BufferLayout, ...]


def place_parameters(
    parameters: Sequence[ParamShape],
    optimizer: OptimizerSpec,
    *,
    num_shards: Mapping[Grid, int],
    bucket_size: int | None = None,
) -> ParamLayout:
    """Places parameters given in the order of registration.

    `num_shards` is the data-parallel size of each grid. A bucket closes with the parameter that fills it to
    `bucket_size` elements or more; None takes Megatron's size, max(40 million, 1 million per rank).
    """
    groups: dict[BufferKey, list[ParamShape]] = {}
    for parameter in reversed(parameters):
        groups.setdefault(buffer_key(parameter, optimizer), []).append(parameter)
    return ParamLayout(
        buffers=tuple(
            _place_buffer(key, members, num_shards[key.grid], bucket_size or default_bucket_size(num_shards[key.grid]))
            for key, members in groups.items()
        )
    )


def default_bucket_size(num_ranks: int) -> int:
    """Elements: large enough that a collective over `num_ranks` is bound by bandwidth."""
    return max(40_000_000, 1_000_000 * num_ranks)


def buffer_key(parameter: ParamShape, optimizer: OptimizerSpec) -> BufferKey:
    meta = parameter.meta
    return BufferKey(
        grid=meta.grid,
        dtype=parameter.dtype,
        router=meta.role == "router",
        decay=decays(parameter, decay_qk_norm=optimizer.decay_qk_norm),
        decoupled_lr=optimizer.decoupled_lr is not None and meta.role in ("embedding", "head"),
    )


def decays(parameter: ParamShape, *, decay_qk_norm: bool) -> bool:
    """Weight decay is for matrices: not for vectors, nor for biases in any shape. Norms of q and k decay on request."""
    if decay_qk_norm and ("q_layernorm." in parameter.name or "k_layernorm." in parameter.name):
        return True
    return parameter.meta.decay and len(parameter.shape) > 1 and not parameter.name.endswith(".bias")


def _place_buffer(key: BufferKey, members: Iterable[ParamShape], num_shards: int, bucket_size: int) -> BufferLayout:
    bucket_align = lcm(BUCKET_ALIGN, num_shards)
    places: list[Place] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = end = 0
    for parameter in members:
        start = _round_up(end, ELEMENT_ALIGN)
        places.append(Place(name=parameter.name, shape=parameter.shape, start=start, bucket=len(buckets)))
        end = start + parameter.numel
        if end - bucket_start >= bucket_size:
            end = _round_up(end, bucket_align)
            buckets.append((bucket_start, end))
            bucket_start = end
    if end > bucket_start:
        end = _round_up(end, bucket_align)
        buckets.append((bucket_start, end))
    return BufferLayout(key=key, size=end, places=tuple(places), buckets=tuple(buckets))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
