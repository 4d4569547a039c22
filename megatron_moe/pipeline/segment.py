"""Runs forward and backward of one microbatch through one model chunk as autograd segments, one per step.

Without overlap a chunk is one step. An overlapped schedule interleaves the layer nodes of two microbatches. An exchange
(dispatch or combine) has two steps. The first step, the start, runs when the schedule launches the exchange. The
second step, the finish, waits for the received rows and runs as late as possible, right before the microbatch's next
step. Work of the other microbatch that is launched between the two overlaps with the exchange, also in the backward.

The autograd graph is cut between steps, and gradients are passed explicitly. The state between two steps is any nest of
frozen dataclasses and tuples. Each tensor of the state that requires a gradient becomes a `CutTensor`. The graph of the
next step starts from a tensor that shares the data but does not save it, so unsaved activations are freed as usual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_moe.parallel.pytree import map_state
from megatron_moe.parallel.streams import Event, Streams
from megatron_moe.pipeline.overlap import OverlapNode, Step


class GradBoundary:
    """Autograd edge of a tensor at a cut of the graph, and the sum of the gradients from all segments that used it."""

    def __init__(self, edge: GradientEdge | None) -> None:
        """`edge`: autograd edge that produced the tensor; None for the input of the chunk."""
        self.edge = edge
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(frozen=True, eq=False)
class CutTensor:
    """Detached tensor that is passed between segments, and the boundary that accumulates its gradient."""

    data: Tensor
    boundary: GradBoundary


class SegmentedMicrobatch:
    """Runs the steps of one microbatch, first forward and then backward. The backward of a step frees its graph."""

    def __init__(self, steps: Sequence[Step], received: Tensor | None, streams: Streams) -> None:
        """`received`: output of the previous stage; None in the first stage."""
        self._steps = steps
        self._indices: dict[tuple[str, int | None], list[int]] = {}
        """Indices of the steps of every node: two if it is an exchange, else one."""
        for index, step in enumerate(steps):
            self._indices.setdefault((step.node, step.layer), []).append(index)
        self._streams = streams
        self._last_step: Event = streams.record()
        self._received = GradBoundary(None)
        self._state: Any = received
        self._cuts: Sequence[CutTensor] = ()
        """All `CutTensor`s of the state."""
        if received is not None and torch.is_grad_enabled():
            self._state = CutTensor(received, self._received)
            self._cuts = (self._state,)
        self._boundaries: list[list[GradBoundary]] = []
        """Boundaries of the outputs of each step, for steps whose forward has run and whose backward has not."""
        self._num_forward = 0
        self._output: GradBoundary | None = None

    def forward(self, entry: OverlapNode | None = None) -> None:
        """Runs the pending steps up to and including the first step of `entry`, or all of them if `entry` is None."""
        end = len(self._steps) if entry is None else self._step_indices(entry, (-1,))[0] + 1
        while self._num_forward < end:
            self._forward(self._steps[self._num_forward])
            self._num_forward += 1

    def output(self) -> Tensor:
        """Returns the output of the chunk; to be called once, after the last step."""
        assert self._num_forward == len(self._steps), f"{self._num_forward} of {len(self._steps)} steps have run"
        state, self._state = self._state, None
        if isinstance(state, CutTensor):
            self._output = state.boundary
            return state.data
        assert isinstance(state, Tensor), f"the output of a chunk must be a tensor, not a {type(state).__name__}"
        return state

    def begin_backward(self, gradient: Tensor | None) -> None:
        """Sets the gradient of the chunk's output; None if the output is the scalar loss."""
        assert self._output is not None, "the output of this chunk requires no gradient"
        if gradient is not None:
            self._output.add(gradient)

    def backward(self, entry: OverlapNode | None = None) -> None:
        """Runs pending backwards in reverse step order, down to the last step of `entry`, or all if `entry` is None."""
        start = 0 if entry is None else self._step_indices(entry, (len(self._boundaries),))[-1]
        while len(self._boundaries) > start:
            self._backward(self._steps[len(self._boundaries) - 1], self._boundaries.pop())

    def input_gradient(self) -> Tensor:
        """Returns the gradient of the received tensor; to be called once, after the last backward."""
        gradient, self._received.gradient = self._received.gradient, None
        assert gradient is not None, "the received tensor has no gradient"
        return gradient

    def _step_indices(self, entry: OverlapNode, default: Sequence[int]) -> Sequence[int]:
        """Indices of the steps of an entry's node in ascending order; `default` if the chunk lacks the node."""
        return self._indices.get((entry.node, entry.layer), default)

    def _forward(self, step: Step) -> None:
        streams = self._streams
        with streams.on(step.stream):
            streams.wait(self._last_step)
            cut = _GraphCut(streams.record_use, self._cuts)
            state, self._state = cut.enter(self._state), None
            self._state, self._cuts = cut.leave(step.run(state))
            self._last_step = streams.record()
        self._boundaries.append(cut.boundaries)

    def _backward(self, step: Step, boundaries: list[GradBoundary]) -> None:
        streams = self._streams
        with streams.on(step.stream):
            streams.wait(self._last_step)
            reached = [each for each in boundaries if each.gradient is not None or each is self._output]
            for boundary in reached:
                if boundary.gradient is not None:
                    streams.record_use(boundary.gradient)
            if reached:
                _run_backward([each.edge for each in reached], [each.gradient for each in reached])
            for boundary in boundaries:
                boundary.edge = boundary.gradient = None
            self._last_step = streams.record()


def _run_backward(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Runs the backward from `edges`; the gradient None means 1. Gradients that an earlier backward has computed have
    the right shapes, so that they are passed to the engine without the checks of `torch.autograd.backward`, which take
    as long on the host as the launches of a node."""
    if any(gradient is None for gradient in gradients):
        torch.autograd.backward(tuple(edge for edge in edges if edge is not None), tuple(gradients))
        return
    run = torch.autograd.Variable._execution_engine.run_backward
    run(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _GraphCut:
    """Cuts the autograd graph before and after a step: `enter` converts the step's input, `leave` its output."""

    def __init__(self, record_use: Callable[[Tensor], None], cuts: Sequence[CutTensor]) -> None:
        """`record_use`: called with every tensor of the step's input (`Streams.record_use`). `cuts`: all `CutTensor`s
        of the step's input."""
        self.boundaries: list[GradBoundary] = []
        """Boundaries of the output tensors that the step itself computed, not of tensors that it passed through."""
        self._record_use = record_use
        self._entered = dict(zip(cuts, _enter(cuts), strict=True))
        self._cuts = {id(tensor): (tensor, cut) for cut, tensor in self._entered.items()}
        """Maps id(tensor) to (tensor, its `CutTensor`). The reference to the tensor keeps the id valid."""
        self._left: dict[CutTensor, None] = {}
        """`CutTensor`s of the step's output."""

    def enter(self, state: Any) -> Any:
        """Replaces each `CutTensor` of the state by a tensor that starts a new graph."""
        return map_state(state, self._enter, (Tensor, CutTensor))

    def leave(self, state: Any) -> tuple[Any, Sequence[CutTensor]]:
        """Replaces each tensor that requires a gradient by a `CutTensor`, and returns all of these. A tensor that
        `enter` made from a `CutTensor` is replaced by that `CutTensor`."""
        state, left = map_state(state, self._leave, (Tensor, CutTensor)), tuple(self._left)
        del self._entered, self._cuts
        return state, left

    def _enter(self, leaf: Tensor | CutTensor) -> Tensor:
        if isinstance(leaf, CutTensor):
            self._record_use(leaf.data)
            return self._entered[leaf]
        self._record_use(leaf)
        return leaf

    def _leave(self, leaf: Tensor | CutTensor) -> Tensor | CutTensor:
        assert isinstance(leaf, Tensor), "a CutTensor inside a segment was not replaced by `enter`"
        if not leaf.requires_grad:
            return leaf
        if id(leaf) not in self._cuts:
            boundary = GradBoundary(get_gradient_edge(leaf))
            self.boundaries.append(boundary)
            self._cuts[id(leaf)] = leaf, CutTensor(leaf.detach(), boundary)
        cut = self._cuts[id(leaf)][1]
        self._left[cut] = None
        return cut


def _enter(cuts: Sequence[CutTensor]) -> Sequence[Tensor]:
    """Returns a tensor per `CutTensor` with its data, all of which start a new graph."""
    if not cuts:
        return ()
    data = [cut.data for cut in cuts]
    anchor = data[0].new_empty(0, requires_grad=True)
    found: Sequence[Tensor] = _Enter.apply(anchor, [cut.boundary for cut in cuts], *data)  # type: ignore[no-untyped-call]
    return found


class _Enter(torch.autograd.Function):
    """Identity of `data`. Its backward adds the gradients to `boundaries`; `anchor` makes autograd record the
    function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, boundaries: Sequence[GradBoundary], *data: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.boundaries = boundaries
        return tuple(each.view_as(each) for each in data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for boundary, grad in zip(ctx.boundaries, grads, strict=True):
            if grad is not None:
                boundary.add(grad)
        return (None,) * (2 + len(grads))
