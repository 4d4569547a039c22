"""Layout of parameters in flat buffers: offsets, buckets, units and owner ranges. This module does not import torch.

Parameters that are reduced over the same ranks and updated with the same hyperparameters share a flat buffer, so that
one kernel per buffer computes the norm or the optimizer step. Inside a buffer, parameters are in reverse order of
registration, which is about the order in which a backward pass finishes their gradients. A bucket is the range of a
buffer that one collective covers. Under ZeRO-1 (Rajbhandari et al., arXiv 1910.02054) each data-parallel rank owns one
range of every bucket. An update rule can require that no range boundary divides a block or matrix (`OwnerAlignment`).
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod
from typing import Literal

from megatron_moe.config.fsdp import unit_of
from megatron_moe.config.matrix_owners import assign_matrices_to_owners, matrix_shape, update_cost
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, default_bucket_size
from megatron_moe.config.param_meta import Grid, ParamMeta
from megatron_moe.config.precision import FloatName
from megatron_moe.config.update_rules import OwnerAlignment, rule_of, spec_of

ELEMENT_ALIGN = 64
"""Every parameter starts at a multiple of this many elements."""
BUCKET_ALIGN = 128
"""Every shard of a bucket starts at a multiple of this many elements."""
_HIGH_BANDWIDTH_ALIGN = 1 << 16

Range = tuple[int, int]
"""(start, end) in elements of a flat buffer."""
Direction = Literal["forward", "backward"]
"""Pass that uses weights. A recomputed forward is a forward."""
StorageFormat = FloatName
"""Dtype in which a parameter is stored."""


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """Shape and properties of one parameter on this rank."""

    name: str
    """Global name: path in the module tree, with the global layer index."""
    shape: tuple[int, ...]
    storage: StorageFormat
    meta: ParamMeta
    replicated: bool = False
    """True if all tensor-parallel ranks (tp, for experts etp) hold the same elements."""
    shared_stages: bool = False
    """True if other pipeline stages have copies of the same elements."""
    uses: int = 1
    """Number of times that the backward of one microbatch adds to this parameter's gradient on this rank."""
    code_bits: tuple[int, ...] = ()
    """Bits per element of each quantised copy of the weight that is stored instead of its values."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        """Name of the set of parameters that `ParamStore` makes available together with this one (`unit_of`)."""
        return unit_of(self.name, self.meta.grid)

    @property
    def matrix_costs(self) -> list[int]:
        """Relative cost of the update of each matrix."""
        rows, columns = matrix_shape(self.shape, self.meta)
        return [update_cost(rows, columns)] * (self.numel // (rows * columns))

    def owner_boundaries(self, alignment: OwnerAlignment) -> list[int]:
        """Offsets in elements at which an owner's range may start. The alignment must not be `element`."""
        rows, columns = matrix_shape(self.shape, self.meta)
        size = rows * columns
        steps = {"matrix": size, "block_128x128": 128 * columns, "block_1x32": 32 if columns % 32 == 0 else columns}
        return [start + edge for start in range(0, self.numel, size) for edge in range(0, size, steps[alignment])]


@dataclass(frozen=True, kw_only=True)
class BufferKey:
    """Properties that all parameters of a buffer share."""

    grid: Grid
    storage: StorageFormat
    rule: str = "adam"
    """Name of the update rule (`OptimizerConfig.optimizer`)."""
    unit: str = ""
    """Unit whose parameters the buffer contains; empty if it contains parameters of all units."""
    code_bits: tuple[int, ...] = ()
    """Bits per element of each quantised copy that is stored instead of the weights; empty if the weights are
    stored."""
    router: bool
    """True for router weights, whose gradient norm is reported separately."""
    decay: bool
    decoupled_lr: bool
    replicated: bool = False
    """True if all tensor-parallel ranks hold the same elements; norms and checkpoints use the first rank's copy."""
    partial: bool = False
    """True if `replicated` and every tensor-parallel rank computes a partial gradient; these gradients are summed."""
    shared_stages: bool = False
    """True if several stages hold the same elements. Their gradients are summed; norms use the first stage's copy."""

    @property
    def without_unit(self) -> "BufferKey":
        """Key of the buffer that would contain the parameters of all units."""
        return replace(self, unit="")


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """Position of one parameter in a buffer. `start` and `end` are offsets in elements."""

    parameter: ParamShape
    start: int
    bucket: int
    registered: int
    """Index of the parameter in the order of registration."""

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Layout of one flat buffer. Sizes are in elements. Elements between parameters are padding and stay zero."""

    key: BufferKey
    size: int
    params: tuple[ParamSlot, ...]
    buckets: tuple[Range, ...]
    """Consecutive ranges that together cover the buffer."""

    @property
    def padding(self) -> int:
        return self.size - self.num_elements(0, self.size)

    def num_elements(self, start: int, end: int) -> int:
        """Number of elements between `start` and `end` that are not padding."""
        return sum(max(0, min(param.end, end) - max(param.start, start)) for param in self.params)

    def owner_ranges(self, num_owners: int, loads: list[float] | None = None) -> tuple[tuple[Range, ...], ...]:
        """Range of each owner in each bucket, indexed [owner][bucket]. The ranges together cover the buffer.

        If the update rule has the alignment `element`, all ranges of a bucket have equal size. If it updates whole
        matrices, owners get matrices of about equal cost over all buckets. Otherwise a boundary inside a block is moved
        to its start. Ranges can then differ in size and be empty. `loads`: cost of the matrices that each owner has in
        other buffers, which is increased by that of this buffer.
        """
        loads = [0.0] * num_owners if loads is None else loads
        by_bucket = [self.divide_among_owners(bucket, num_owners, loads) for bucket in self.buckets]
        return tuple(tuple(ranges) for ranges in zip(*by_bucket, strict=True)) if by_bucket else ((),) * num_owners

    def divide_among_owners(self, bounds: Range, num_owners: int, loads: list[float]) -> list[Range]:
        """Divides a range of the buffer, which splits no block or matrix, among the owners (see `owner_ranges`)."""
        (start, end), alignment = bounds, spec_of(self.key.rule).alignment
        params = [self.params[index] for index in self.param_indices_between(start, end)]
        if alignment == "matrix":
            found = [
                (param.start + edge, cost)
                for param in params
                for edge, cost in zip(
                    param.parameter.owner_boundaries(alignment), param.parameter.matrix_costs, strict=True
                )
                if start <= param.start + edge < end
            ]
            starts = [*(edge for edge, _ in found), end]
            # the first owner also receives the padding before its matrices, the last owner the padding after its
            # matrices
            first_matrices = assign_matrices_to_owners([cost for _, cost in found], loads)
            edges = [start, *(starts[first] for first in first_matrices[1:])]
        else:
            size, rest = divmod(end - start, num_owners)
            assert rest == 0 or alignment != "element", f"a bucket of {end - start} elements for {num_owners} ranks"
            edges = [start + owner * size for owner in range(num_owners)]
            if alignment != "element":
                edges = [start, *(_owner_edge(params, edge, alignment) for edge in edges[1:])]
        return list(pairwise([*edges, end]))

    def param_indices_between(self, start: int, end: int) -> range:
        """Indices of the parameters that have elements between `start` and `end`."""
        first = bisect_right(self.params, start, key=lambda param: param.end)
        return range(first, bisect_left(self.params, end, key=lambda param: param.start))


def _owner_edge(params: Iterable[ParamSlot], edge: int, alignment: OwnerAlignment) -> int:
    """Moves the boundary `edge` between two owners to the start of the block or matrix that contains it."""
    inside = next((param for param in params if param.start < edge < param.end), None)
    if inside is None:
        return edge
    edges = inside.parameter.owner_boundaries(alignment)
    return inside.start + edges[bisect_right(edges, edge - inside.start) - 1]


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """Layouts of all flat buffers of one rank."""

    buffers: tuple[BufferLayout, ...]

    def buckets_of_units(self) -> dict[str, tuple[int, ...]]:
        """Maps each unit to the buckets that contain its parameters, given as ascending indices in `forward_order`."""
        index = {at: number for number, at in enumerate(forward_order(self))}
        found: dict[str, set[int]] = {}
        for number, buffer in enumerate(self.buffers):
            for param in buffer.params:
                found.setdefault(param.parameter.unit, set()).add(index[number, param.bucket])
        return {unit: tuple(sorted(buckets)) for unit, buckets in found.items()}


def place_parameters(
    parameters: Sequence[ParamShape],
    optimizer: OptimizerConfig,
    *,
    num_shards: Mapping[Grid, int],
    config: DataParallelConfig | None = None,
    by_unit: bool = False,
) -> ParamLayout:
    """Assigns parameters, given in the order of registration, to buffers and buckets.

    `num_shards` is the number of data-parallel ranks of each grid. A bucket ends after the parameter with which it
    reaches the bucket size. The default bucket size is Megatron's: max(40 million, 1 million per rank) elements.
    If `by_unit`, every buffer contains parameters of one unit and consists of one bucket.
    """
    config = config or DataParallelConfig()
    size = config.ddp_bucket_size
    if config.ddp_num_buckets is not None:
        size = -(-sum(parameter.numel for parameter in parameters) // config.ddp_num_buckets)
    groups: dict[BufferKey, list[tuple[int, ParamShape]]] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        key = buffer_key(parameter, optimizer, unit=parameter.unit if by_unit else "")
        groups.setdefault(key, []).append((index, parameter))
    buffers = []
    for key, members in groups.items():
        shards = num_shards[key.grid]
        align = BUCKET_ALIGN * shards
        align = lcm(align, _HIGH_BANDWIDTH_ALIGN) if config.ddp_pad_buckets_for_high_nccl_busbw else align
        most = sys.maxsize if by_unit else size or default_bucket_size(shards)
        buffers.append(_place_buffer(key, members, align, most))
    return ParamLayout(buffers=tuple(buffers))


def reduction_order(layout: ParamLayout) -> tuple[tuple[int, int], ...]:
    """Returns (buffer, bucket) indices in the order in which a backward pass completes the buckets. Buckets are sorted
    by the registration index of their first registered parameter, descending. All ranks of a reduction use this
    order."""
    first: dict[tuple[int, int], int] = {}
    for index, buffer in enumerate(layout.buffers):
        for param in buffer.params:
            at = (index, param.bucket)
            first[at] = min(param.registered, first.get(at, param.registered))
    return tuple(sorted(first, key=lambda at: -first[at]))


def forward_order(layout: ParamLayout) -> tuple[tuple[int, int], ...]:
    """Returns (buffer, bucket) indices in the order in which a forward pass reads the buckets."""
    return reduction_order(layout)[::-1]


def buffer_key(parameter: ParamShape, optimizer: OptimizerConfig, unit: str = "") -> BufferKey:
    meta = parameter.meta
    return BufferKey(
        grid=meta.grid,
        storage=parameter.storage,
        rule=rule_of(parameter.name, meta, optimizer),
        unit=unit,
        code_bits=parameter.code_bits,
        router=meta.role == "router",
        decay=has_weight_decay(parameter, decay_qk_norm=optimizer.apply_wd_to_qk_layernorm),
        decoupled_lr=optimizer.decoupled_lr is not None and meta.role in ("embedding", "head"),
        replicated=parameter.replicated,
        partial=parameter.replicated and meta.partial_over_tp,
        shared_stages=parameter.shared_stages,
    )


def has_weight_decay(parameter: ParamShape, *, decay_qk_norm: bool) -> bool:
    """True if weight decay applies: for parameters of two or more dims that have `ParamMeta.decay` and are not biases,
    and for q and k norms if `decay_qk_norm`."""
    if decay_qk_norm and ("q_layernorm." in parameter.name or "k_layernorm." in parameter.name):
        return True
    return parameter.meta.decay and len(parameter.shape) > 1 and not parameter.name.endswith(".bias")


def _place_buffer(
    key: BufferKey, members: Iterable[tuple[int, ParamShape]], bucket_align: int, bucket_size: int
) -> BufferLayout:
    params: list[ParamSlot] = []
    buckets: list[Range] = []
    bucket_start = end = 0
    for index, parameter in members:
        start = _round_up(end, ELEMENT_ALIGN)
        params.append(ParamSlot(parameter=parameter, start=start, bucket=len(buckets), registered=index))
        end = start + parameter.numel
        if end - bucket_start >= bucket_size:
            end = _round_up(end, bucket_align)
            buckets.append((bucket_start, end))
            bucket_start = end
    if end > bucket_start:
        end = _round_up(end, bucket_align)
        buckets.append((bucket_start, end))
    return BufferLayout(key=key, size=end, params=tuple(params), buckets=tuple(buckets))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
