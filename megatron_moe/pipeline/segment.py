"""Runs forward and backward of one microbatch through one model chunk as autograd segments, one per step.

Without overlap a chunk is one step. An overlapped schedule interleaves the layer nodes of two microbatches. An exchange
(dispatch or combine) has two steps. The first step, the start, runs when the schedule launches the exchange. The
second step, the finish, waits for the received rows and runs as late as possible, right before the microbatch's next
step. Work of the other microbatch that is launched between the two overlaps with the exchange, also in the backward.

The autograd graph is cut between steps, and gradients are passed explicitly. The state between two steps is any nest of
frozen dataclasses and tuples. The graph of the next step starts from tensors that share the data of those that the
previous step computed but do not save it, so unsaved activations are freed as usual.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.pytree import map_state
from megatron_moe.parallel.streams import Event, Streams
from megatron_moe.pipeline.overlap import OverlapNode, Step


class GradBoundary:
    """Autograd edge of a tensor at a cut of the graph, and the sum of the gradients from all segments that used it."""

    __slots__ = ("edge", "gradient", "stream")

    def __init__(self, edge: GradientEdge | None) -> None:
        """`edge`: autograd edge that produced the tensor; None for the input of the chunk."""
        self.edge = edge
        self.gradient: Tensor | None = None
        self.stream = ""
        """Stream of the last step whose graph starts from the tensor."""

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class SegmentedMicrobatch:
    """Runs the steps of one microbatch, first forward and then backward. The backward of a step frees its graph."""

    def __init__(self, steps: Sequence[Step], received: Tensor | None, streams: Streams) -> None:
        """`received`: output of the previous stage; None in the first stage."""
        self._steps = steps
        self._stream_names = [step.stream for step in steps]
        self._indices: dict[tuple[str, int | None], list[int]] = {}
        """Indices of the steps of every node: two if it is an exchange, else one."""
        for index, step in enumerate(steps):
            self._indices.setdefault((step.node, step.layer), []).append(index)
            if step.appended is not None:
                self._indices[step.appended] = [index]
        self._streams = streams
        self._last_step: Event = streams.record()
        self._received = GradBoundary(None)
        self._anchor: Tensor | None = None
        """Empty tensor that requires a gradient; makes autograd record `_Enter`. None if no gradient is required."""
        self._boundaries: list[list[GradBoundary]] = []
        """Boundaries of the outputs of each step, for steps whose forward has run and whose backward has not."""
        self._num_forward = 0
        self._output: GradBoundary | None = None
        self._loss: Tensor | None = None
        """Output of the chunk if it is a scalar."""
        self._state: Any = received
        if received is not None and torch.is_grad_enabled():
            self._state = self._enter(received, self._received, self._stream_names[0] if steps else "")

    def forward(self, entry: OverlapNode | None = None) -> None:
        """Runs the pending steps up to and including the first step of `entry`, or all of them if `entry` is None."""
        end = len(self._steps) if entry is None else self._indices.get((entry.node, entry.layer), (-1,))[0] + 1
        while self._num_forward < end:
            self._forward()

    def output(self) -> Tensor:
        """Returns the output of the chunk; to be called once, after the last step."""
        assert self._num_forward == len(self._steps), f"{self._num_forward} of {len(self._steps)} steps have run"
        state, self._state = self._state, None
        assert isinstance(state, Tensor), f"the output of a chunk must be a tensor, not a {type(state).__name__}"
        if not state.requires_grad:
            return state
        self._output = getattr(state.grad_fn, "cut_boundary", None)
        if self._output is None:
            self._output = GradBoundary(_edge(state))
            self._boundaries[-1].append(self._output)
        output = state.detach()
        self._loss = None if output.dim() else output
        return output

    def begin_backward(self, gradient: Tensor | None) -> None:
        """Sets the gradient of the chunk's output; None if the output is the scalar loss."""
        assert self._output is not None, "the output of this chunk requires no gradient"
        if gradient is None:
            assert self._loss is not None, "the output of this chunk is not a scalar and needs a gradient"
            gradient = torch.ones_like(self._loss)
        self._output.add(gradient)

    def backward(self, entry: OverlapNode | None = None) -> None:
        """Runs pending backwards in reverse step order, down to the last step of `entry`, or all if `entry` is None."""
        end = len(self._boundaries)
        start = 0 if entry is None else self._indices.get((entry.node, entry.layer), (end,))[-1]
        for index in reversed(range(start, end)):
            self._backward(self._stream_names[index], self._boundaries.pop())

    def input_gradient(self) -> Tensor:
        """Returns the gradient of the received tensor; to be called once, after the last backward."""
        gradient, self._received.gradient = self._received.gradient, None
        assert gradient is not None, "the received tensor has no gradient"
        return gradient

    def _forward(self) -> None:
        """Runs the next step and cuts the graph after it."""
        index = self._num_forward
        following = index + 1
        stream = self._stream_names[index]

        def run_step() -> None:
            state, self._state = self._state, None
            self._state = self._steps[index].run(state)

        self._last_step = self._streams.run(stream, self._last_step, run_step)
        self._num_forward = following
        self._boundaries.append([])
        if following < len(self._steps):
            # autograd runs the backward of `_Enter` on the stream of its forward: that of the step that computes the
            # gradient, so that no other stream waits for it
            name = self._stream_names[following]
            self._streams.run(name, None, partial(self._cut, name, stream))

    def _cut(self, stream: str, previous: str) -> None:
        """Replaces every tensor of the state that requires a gradient by one with the same data from which a new graph
        starts. `stream`, `previous`: streams of the next step and of the previous one."""
        boundaries, entered = self._boundaries[-1], dict[int, Tensor]()

        def cut_tensor(leaf: Tensor) -> Tensor:
            if stream != previous:
                self._streams.record_use(leaf)
            if not leaf.requires_grad:
                return leaf
            boundary = getattr(leaf.grad_fn, "cut_boundary", None)
            if boundary is not None and boundary.stream == stream:
                return leaf  # passed through by the step
            key = id(leaf)
            if key not in entered:
                if boundary is None:
                    boundary = GradBoundary(_edge(leaf))
                    boundaries.append(boundary)
                entered[key] = self._enter(leaf, boundary, stream)
            return entered[key]

        self._state = map_state(self._state, cut_tensor)

    def _enter(self, tensor: Tensor, boundary: GradBoundary, stream: str) -> Tensor:
        """Returns a tensor with the same data from which a new graph starts; its gradient is added to `boundary`."""
        if self._anchor is None:
            self._anchor = tensor.new_empty(0, requires_grad=True)
        boundary.stream = stream
        return _Enter.apply(self._anchor, boundary, (tensor,))

    def _backward(self, stream: str, boundaries: Sequence[GradBoundary]) -> None:
        self._last_step = self._streams.run(stream, self._last_step, partial(self._run_backward, boundaries))

    def _run_backward(self, boundaries: Sequence[GradBoundary]) -> None:
        """Runs the backward of a step from the gradients of its outputs. They have the right shapes, because an earlier
        backward has computed them: the checks of `torch.autograd.backward` take as long as the launches of a node."""
        edges, gradients = [], []
        for boundary in boundaries:
            if boundary.gradient is not None:
                self._streams.record_use(boundary.gradient)
                edges.append(boundary.edge)
                gradients.append(boundary.gradient)
            boundary.edge = boundary.gradient = None
        if edges:
            run = torch.autograd.Variable._execution_engine.run_backward
            run(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _edge(tensor: Tensor) -> GradientEdge:
    """Edge of a view of the tensor. The view's node owns the graph that computed the tensor, which a node written in
    Python does not. `torch.autograd.graph.get_gradient_edge` makes such a view too, in three times the host time."""
    node = tensor.view_as(tensor).grad_fn
    assert node is not None, "a tensor outside the graph has no edge"
    return GradientEdge(node, 0)


class _Enter(AutogradFunction):
    """Alias of the tensor in `source`, outside of its graph. Its backward adds the gradient to `boundary`.

    `anchor` makes autograd record the function.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, boundary: GradBoundary, source: tuple[Tensor]) -> Tensor:
        ctx.cut_boundary = boundary
        return source[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.cut_boundary.add(grad)
        return None, None, None
