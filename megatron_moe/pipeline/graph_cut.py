"""The boundary between two pieces of a forward: the graph is cut, and gradients are handed over explicitly.

What a piece leaves is any structure of frozen dataclasses and tuples. Every tensor in it that has a gradient becomes a
`CutTensor`: its data, and the `GradBoundary` at which its gradients are added up. The graph of the next piece starts
from a
tensor that shares the data but does not keep it: what no operation saves is freed, as in one graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_moe.memory.pytree import map_fields


class GradBoundary:
    """Where a tensor left a piece, and the sum of what the pieces behind say about its gradient, the last one first."""

    def __init__(self, edge: GradientEdge | None) -> None:
        """`edge`: None for what came from outside of the chunk."""
        self.edge = edge
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(frozen=True, eq=False)
class CutTensor:
    """A tensor on a boundary."""

    data: Tensor
    crossing: GradBoundary


class SegmentIO:
    """One piece's way over its two boundaries: `enter` what the piece takes, then `leave` what it gives."""

    def __init__(self, record_use: Callable[[Tensor], None]) -> None:
        """`record_use`: called with every tensor that enters (`Streams.record_use`)."""
        self.left: list[GradBoundary] = []
        """Of tensors that this piece made."""
        self._record_use = record_use
        self._tensors: dict[CutTensor, Tensor] = {}
        """What entered, by the cut that it came from."""
        self._cuts: dict[int, tuple[Tensor, CutTensor]] = {}
        """By the id of a tensor, kept alive here, the cut that stands for it."""

    def enter(self, state: Any) -> Any:
        """Tensors in place of cuts."""
        return _rebuilt(state, self._enter)

    def leave(self, state: Any) -> Any:
        """Cuts in place of tensors with a gradient. What only passes through keeps the cut that it came with."""
        state = _rebuilt(state, self._leave)
        self._tensors.clear()
        self._cuts.clear()
        return state

    def _enter(self, leaf: Tensor | CutTensor) -> Tensor:
        if not isinstance(leaf, CutTensor):
            self._record_use(leaf)
            return leaf
        if leaf not in self._tensors:
            data = leaf.data
            self._record_use(data)
            anchor = torch.empty(0, dtype=data.dtype, device=data.device, requires_grad=True)
            tensor: Tensor = _Enter.apply(anchor, data, leaf.crossing)  # type: ignore[no-untyped-call]
            self._tensors[leaf] = tensor
            self._cuts[id(tensor)] = tensor, leaf
        return self._tensors[leaf]

    def _leave(self, leaf: Tensor | CutTensor) -> Tensor | CutTensor:
        assert isinstance(leaf, Tensor), "a cut inside of a piece"
        if id(leaf) in self._cuts:
            return self._cuts[id(leaf)][1]
        if not leaf.requires_grad:
            return leaf
        crossing = GradBoundary(get_gradient_edge(leaf))
        self.left.append(crossing)
        cut = CutTensor(leaf.detach(), crossing)
        self._cuts[id(leaf)] = leaf, cut
        return cut


class _Enter(torch.autograd.Function):
    """The data as it is; its gradient goes to the crossing. The anchor makes autograd record this."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor, crossing: GradBoundary) -> Tensor:
        ctx.crossing = crossing
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.crossing.add(grads[0])
        return None, None, None


def _rebuilt(state: Any, change: Callable[[Any], Any]) -> Any:
    """Copies the structure with other tensors or cuts. A pending exchange is changed in place, because both its halves
    refer to it: `replace_boundary(change)` applies `change` to the tensors that connect their graphs."""
    if isinstance(state, Tensor | CutTensor):
        return change(state)
    if isinstance(state, tuple):
        return tuple(_rebuilt(part, change) for part in state)
    if hasattr(state, "replace_boundary"):
        state.replace_boundary(change)
    elif is_dataclass(state) and not isinstance(state, type):
        return map_fields(state, lambda part: _rebuilt(part, change))
    return state
