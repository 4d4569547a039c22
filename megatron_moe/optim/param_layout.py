"""Where every parameter lives in the flat buffers. Pure maths, no torch.

Parameters that are reduced over the same ranks and stepped with the same hyperparameters share a flat buffer, so that
the norm, the reduction and the optimizer step are one kernel per buffer. Inside a buffer they stand in reverse order of
registration, which is about the order in which a backward pass finishes them, and are cut into buckets: the unit of a
collective. Starts and bucket ends are aligned so that a bucket divides into equal shards for its data-parallel ranks.
What holds for a buffer holds for every shard of it, so that a rank can treat the shards that it owns as a whole buffer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.precision import FloatName
from megatron_moe.parallel.param_meta import Grid, ParamMeta

ELEMENT_ALIGN = 64
"""Every parameter starts at a multiple of this many elements."""
BUCKET_ALIGN = 128
"""Every shard of a bucket starts at a multiple of this many elements."""
_HIGH_BANDWIDTH_ALIGN = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """One parameter as this rank holds it."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    dtype: FloatName
    meta: ParamMeta
    replicated: bool = False
    """Other tensor-parallel ranks of the parameter's grid hold the same elements."""
    shared_stages: bool = False
    """Other pipeline stages do."""

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
    replicated: bool = False
    """Tensor-parallel ranks hold the same elements; the first of them counts."""
    partial: bool = False
    """Each of those ranks computes a part of the gradient; the parts are to be summed."""
    shared_stages: bool = False
    """Two pipeline stages hold the same elements and compute a part of the gradient each; the first of them counts."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One parameter in a buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    bucket: int
    registered: int
    """Index in the order of registration."""

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
        return self.size - self.elements(0, self.size)

    def elements(self, start: int, end: int) -> int:
        """How many places between start and end belong to parameters."""
        return sum(max(0, min(place.end, end) - max(place.start, start)) for place in self.places)


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """All buffers of one rank."""

    buffers: tuple[BufferLayout, ...]


def place_parameters(
    parameters: Sequence[ParamShape],
    optimizer: OptimizerConfig,
    *,
    num_shards: Mapping[Grid, int],
    config: DataParallelConfig | None = None,
) -> ParamLayout:
    """Places parameters given in the order of registration.

    `num_shards` is the data-parallel size of each grid. A bucket closes with the parameter that fills it to the bucket
    size or more. Without a wish in `spec` that is Megatron's, max(40 million, 1 million per rank).
    """
    config = config or DataParallelConfig()
    size = config.bucket_size
    if config.num_buckets is not None:
        size = -(-sum(parameter.numel for parameter in parameters) // config.num_buckets)
    groups: dict[BufferKey, list[tuple[int, ParamShape]]] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        groups.setdefault(buffer_key(parameter, optimizer), []).append((index, parameter))
    buffers = []
    for key, members in groups.items():
        shards = num_shards[key.grid]
        align = BUCKET_ALIGN * shards
        align = lcm(align, _HIGH_BANDWIDTH_ALIGN) if config.pad_buckets else align
        buffers.append(_place_buffer(key, members, align, size or default_bucket_size(shards)))
    return ParamLayout(buffers=tuple(buffers))


def reduction_order(layout: ParamLayout) -> tuple[tuple[int, int], ...]:
    """(buffer, bucket) in the order in which a backward pass completes them: by their first registered parameter, the
    last one first. It follows from the model alone, so all ranks agree on it."""
    first: dict[tuple[int, int], int] = {}
    for index, buffer in enumerate(layout.buffers):
        for place in buffer.places:
            at = (index, place.bucket)
            first[at] = min(place.registered, first.get(at, place.registered))
    return tuple(sorted(first, key=lambda at: -first[at]))


def default_bucket_size(num_ranks: int) -> int:
    """Elements: large enough that a collective over `num_ranks` is bound by bandwidth."""
    return max(40_000_000, 1_000_000 * num_ranks)


def buffer_key(parameter: ParamShape, optimizer: OptimizerConfig) -> BufferKey:
    meta = parameter.meta
    return BufferKey(
        grid=meta.grid,
        dtype=parameter.dtype,
        router=meta.role == "router",
        decay=decays(parameter, decay_qk_norm=optimizer.decay_qk_norm),
        decoupled_lr=optimizer.decoupled_lr is not None and meta.role in ("embedding", "head"),
        replicated=parameter.replicated,
        partial=parameter.replicated and meta.partial_over_tp,
        shared_stages=parameter.shared_stages,
    )


def decays(parameter: ParamShape, *, decay_qk_norm: bool) -> bool:
    """Weight decay is for matrices: not for vectors, nor for biases in any shape. Norms of q and k decay on request."""
    if decay_qk_norm and ("q_layernorm." in parameter.name or "k_layernorm." in parameter.name):
        return True
    return parameter.meta.decay and len(parameter.shape) > 1 and not parameter.name.endswith(".bias")


def _place_buffer(
    key: BufferKey, members: Iterable[tuple[int, ParamShape]], bucket_align: int, bucket_size: int
) -> BufferLayout:
    places: list[Place] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = end = 0
    for index, parameter in members:
        start = _round_up(end, ELEMENT_ALIGN)
        places.append(
            Place(name=parameter.name, shape=parameter.shape, start=start, bucket=len(buckets), registered=index)
        )
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
