"""Optimizer state as pieces of global tensors, so that a checkpoint does not depend on who owned what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal

from torch import Tensor

from megatron_moe.parallel.parameter import Parameter
from megatron_moe.specs.layout_params import Place, range_boxes
from megatron_moe.specs.params import Box, sharded_dim

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class StatePiece:
    """A box of a global tensor that this rank owns."""

    offset: tuple[int, ...]
    """Where it begins."""
    data: Tensor
    """A view of the state: copying into it restores the state."""


@dataclass(frozen=True)
class StateTensor:
    """What this rank owns of one kind of state of one parameter."""

    name: str
    """Global name of the parameter."""
    kind: StateKind
    shape: tuple[int, ...]
    """Of the whole parameter."""
    pieces: tuple[StatePiece, ...]
    """May be none: then other ranks own all of it."""
    counts: bool
    """This rank is the one in the world that saves the pieces; others may own the same."""

    @property
    def whole(self) -> Tensor:
        """The one piece of a rank that owns everything."""
        (piece,) = self.pieces
        assert tuple(piece.data.shape) == self.shape, f"{self.name}: {tuple(piece.data.shape)} of {self.shape}"
        return piece.data


def pieces_of(parameter: Parameter, place: Place, parts: Sequence[tuple[int, Tensor]]) -> Iterator[StatePiece]:
    """Pieces of a parameter in parts of a flat tensor, given as (start in the buffer, elements)."""
    for part_start, flat in parts:
        start, end = max(place.start, part_start), min(place.end, part_start + len(flat))
        for local in range_boxes(place.shape, start - place.start, end - place.start):
            num = prod(local.size)
            data = flat[start - part_start : start - part_start + num].view(local.size)
            start += num
            yield from _global_pieces(parameter, local, data)


def _global_pieces(parameter: Parameter, local: Box, data: Tensor) -> Iterator[StatePiece]:
    """Cuts a box of this rank's tensor where the tensor's own boxes, which stand behind each other, meet."""
    dim = sharded_dim(parameter.meta)
    if dim is None or len(parameter.boxes) == 1:
        offset = tuple(a + b for a, b in zip(local.offset, parameter.boxes[0].offset, strict=True))
        yield StatePiece(offset, data)
        return
    widths = [box.size[dim] for box in parameter.boxes]
    for box, width, before in zip(parameter.boxes, widths, accumulate(widths[:-1], initial=0), strict=True):
        first = max(local.offset[dim], before)
        last = min(local.offset[dim] + local.size[dim], before + width)
        if first < last:
            inside = [*local.offset]
            inside[dim] = first - before
            offset = tuple(a + b for a, b in zip(inside, box.offset, strict=True))
            yield StatePiece(offset, data.narrow(dim, first - local.offset[dim], last - first))
