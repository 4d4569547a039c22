"""Metadata of a parameter: role, grid, initialisation and sharding.

A parameter's global name is its path in the module tree with the global layer index, so it does not depend on the
pipeline stage: `decoder.layers.7.mlp.experts.linear_fc1.weight`.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Role = Literal["matrix", "embedding", "position", "head", "router", "norm", "bias", "gate", "sink", "vector"]
Grid = Literal["attention", "expert"]


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """Metadata of a parameter, stored in `Parameter.meta`."""

    role: Role
    grid: Grid = "attention"
    init: Literal[
        "normal", "output", "embedding", "zeros", "ones", "uniform", "decay_rate", "time_step", "constant"
    ] = "normal"
    """Initial values. output: normal with `InitConfig.output_std`, for matrices that write to the residual stream.
    uniform: in +-1 / sqrt(fan_in). decay_rate: logarithm of numbers uniform in 1 to 16. time_step: inverse
    softplus of numbers whose logarithm is uniform, 0.001 to 0.1. constant: the value `constant`."""
    constant: float = 0.0
    fan_in: int = 1
    """Number of inputs per output element, for unit-gain initialisation."""
    num_experts: int | None = None
    """Global number of experts, which are stacked in dim 0; None means no expert dim."""
    tp_dim: int | None = None
    """Dim that is sharded over tensor-parallel ranks, counted without the expert dim; None if the parameter is
    replicated."""
    splits: tuple[int, ...] = ()
    """Global sizes of matrices that are concatenated along `tp_dim`. If they add up to the size of `tp_dim`, each
    matrix is sharded separately (gate and up). If they add up to less, this sequence of matrices repeats along `tp_dim`
    (q, k, v of each query group), and each rank holds whole repetitions."""
    even_shards: bool = False
    """True if each rank has an equal range of `tp_dim` regardless of `splits`, as for ranks that share a query
    group."""
    mixed_rows: bool = False
    """True if the rows are inputs of unrelated operations (gate, state and time steps of Mamba). Update rules for whole
    matrices do not update it, but leave it to their fallback rule, as in Megatron-LM."""
    decay: bool = True
    """False excludes the parameter from weight decay."""
    partial_over_tp: bool = False
    """True if the parameter is replicated, but each tensor-parallel rank computes a partial gradient (from its own
    tokens under sequence parallelism, or from its own heads). These gradients are summed over tensor-parallel ranks."""
    shared_stages: bool = False
    """True if several pipeline stages have a copy. The copies' gradients are summed; norms count one copy."""


@dataclass(frozen=True)
class ParamBox:
    """Box (slice) of a global tensor: `offset` and `size` in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


Part = tuple[int, int]
"""(index, size): a rank's coordinate on a grid axis, and the size of the axis."""


def sharded_dim(meta: ParamMeta) -> int | None:
    """Dim that is sharded over tensor-parallel ranks, counted with the expert dim; None if it is replicated."""
    return None if meta.tp_dim is None else meta.tp_dim + (meta.num_experts is not None)


def local_boxes(shape: tuple[int, ...], meta: ParamMeta, *, tp: Part, ep: Part) -> tuple[ParamBox, ...]:
    """Boxes of a tensor of global `shape` that form one rank's shard when concatenated along the sharded dim.

    `tp` and `ep` are the rank's coordinates on the tensor- and expert-parallel axes. Each expert-parallel rank has a
    contiguous range of experts.
    """
    offset, size = [0] * len(shape), list(shape)
    if meta.num_experts is not None:
        offset[0], size[0] = _share(shape[0], ep, "experts")
    dim = sharded_dim(meta)
    if dim is None or tp[1] == 1:
        return (ParamBox(tuple(offset), tuple(size)),)
    boxes = []
    for start, width in _cuts(shape[dim], () if meta.even_shards else meta.splits, tp):
        offset[dim], size[dim] = start, width
        boxes.append(ParamBox(tuple(offset), tuple(size)))
    return tuple(boxes)


def local_shape(boxes: tuple[ParamBox, ...], meta: ParamMeta) -> tuple[int, ...]:
    """Shape of a shard: its boxes concatenated along the sharded dim."""
    shape, dim = list(boxes[0].size), sharded_dim(meta)
    if dim is not None:
        shape[dim] = sum(box.size[dim] for box in boxes)
    return tuple(shape)


def _cuts(width: int, splits: tuple[int, ...], tp: Part) -> list[tuple[int, int]]:
    """Returns (start, length) of each range of the sharded dim that a rank has. `width`: global size of the dim."""
    if not splits or sum(splits) < width:
        repeated = sum(splits) or 1
        assert width % repeated == 0, f"{splits} does not repeat within {width}"
        start, count = _share(width // repeated, tp, "query groups" if splits else "rows or columns")
        return [(start * repeated, count * repeated)]
    assert sum(splits) == width, f"{splits} does not fill {width}"
    starts = accumulate(splits[:-1], initial=0)
    shares = (_share(split, tp, "rows or columns of one part") for split in splits)
    return [(start + first, count) for start, (first, count) in zip(starts, shares, strict=True)]


def _share(number: int, part: Part, what: str) -> tuple[int, int]:
    """Returns (start, count) of a rank's part of `number` items, which are divided equally. `what`: the items, for
    errors."""
    index, num_parts = part
    assert number % num_parts == 0, f"{number} {what} cannot be divided equally among {num_parts} ranks"
    return index * (number // num_parts), number // num_parts
