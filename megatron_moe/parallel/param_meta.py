"""What a parameter is, apart from its values: role, grid, sharding. Pure data, no torch.

A parameter's global name is its path in the module tree. Layers are kept under their global index, so the path does
not depend on the pipeline stage: `decoder.layers.7.mlp.experts.linear_fc1.weight`.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Role = Literal["matrix", "embedding", "position", "head", "router", "norm", "bias", "gate", "sink", "vector"]
Grid = Literal["attention", "expert"]


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """Carried by every `torch.nn.Parameter` as `.meta`."""

    role: Role
    grid: Grid = "attention"
    init: Literal["normal", "output", "embedding", "zeros", "ones"] = "normal"
    """normal: std; output: output_std (matrices that write to the residual stream); see `InitConfig`."""
    fan_in: int = 1
    """Inputs summed into one output, for unit-gain initial values."""
    num_experts: int | None = None
    """The parameter is a stack over experts in dim 0; each slice is drawn and saved by its global expert id."""
    tp_dim: int | None = None
    """Dim split over tensor parallel ranks of its grid, counted within one expert for stacks; None: replicated."""
    splits: tuple[int, ...] = ()
    """Sizes along `tp_dim` of the whole parameter that are sharded one by one: gate and up. Where they repeat along the
    dim (q, k, v of every query group), whole repetitions go to a rank."""
    decay: bool = True
    """Weight decay applies."""
    partial_over_tp: bool = False
    """Replicated, but each tensor parallel rank computes only a part of the gradient: from its tokens under sequence
    parallelism, or from its heads. The parts are summed over "tp"."""
    shared_stages: bool = False
    """A copy stands on several pipeline stages; its gradients are summed over them, and it counts once."""


@dataclass(frozen=True)
class ParamBox:
    """A part of a whole tensor: `size` elements from `offset` on, per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


Part = tuple[int, int]
"""(index, number) of this rank on an axis."""


def sharded_dim(meta: ParamMeta) -> int | None:
    """The dim of the whole tensor, experts included, that tensor parallelism cuts."""
    return None if meta.tp_dim is None else meta.tp_dim + (meta.num_experts is not None)


def local_boxes(shape: tuple[int, ...], meta: ParamMeta, *, tp: Part, ep: Part) -> tuple[ParamBox, ...]:
    """What a rank holds of a parameter of the global `shape`: the boxes stand one behind the other along the sharded
    dim.

    `tp` is the rank's part on the tensor axis of the parameter's grid, `ep` its part of the experts. Experts go to
    ranks in contiguous ranges of ids.
    """
    offset, size = [0] * len(shape), list(shape)
    if meta.num_experts is not None:
        offset[0], size[0] = _share(shape[0], ep, "experts")
    dim = sharded_dim(meta)
    if dim is None or tp[1] == 1:
        return (ParamBox(tuple(offset), tuple(size)),)
    boxes = []
    for start, width in _cuts(shape[dim], meta.splits, tp):
        offset[dim], size[dim] = start, width
        boxes.append(ParamBox(tuple(offset), tuple(size)))
    return tuple(boxes)


def local_shape(boxes: tuple[ParamBox, ...], meta: ParamMeta) -> tuple[int, ...]:
    """Shape of the tensor that holds these boxes."""
    shape, dim = list(boxes[0].size), sharded_dim(meta)
    if dim is not None:
        shape[dim] = sum(box.size[dim] for box in boxes)
    return tuple(shape)


def _cuts(width: int, splits: tuple[int, ...], tp: Part) -> list[tuple[int, int]]:
    """(start, width) of every stretch of one dim that goes to the rank."""
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
    """(start, count) of an equal share."""
    index, num_parts = part
    assert number % num_parts == 0, f"{number} {what} do not divide among {num_parts} ranks"
    return index * (number // num_parts), number // num_parts
