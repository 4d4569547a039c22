"""One microbatch on its way through one chunk: its forward step by step, and later its backward in reverse.

Where nothing interleaves the chunk is one step. An overlapped schedule takes it layer node by layer node, beside
another microbatch that goes the other way. An exchange has two steps. The first sends rows off in its slot; the second
waits for them, and runs as late as it can, just before the next step of the same microbatch. So whatever stands between
two slots of one microbatch runs while its rows travel. The same holds for the backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.streams import Event, Streams
from megatron_moe.pipeline.graph_cut import CutTensor, GradBoundary, SegmentIO
from megatron_moe.pipeline.overlap import Slot, Step


class SegmentedMicrobatch:
    """Runs the steps of one microbatch, forward and then backward. Every step's graph is freed by its backward."""

    def __init__(self, steps: Sequence[Step], received: Tensor | None, streams: Streams) -> None:
        """`received`: from the stage before; None: there is none."""
        self._steps = steps
        self._streams = streams
        self._last_step: Event = streams.record()
        self._received = GradBoundary(None)
        self._state: Any = received
        if received is not None and torch.is_grad_enabled():
            self._state = CutTensor(received, self._received)
        self._made: list[list[GradBoundary]] = []
        """What every step that has run made, as far as it has a gradient; shrinks as backwards run."""
        self._num_forward = 0
        self._last: GradBoundary | None = None

    def forward(self, slot: Slot | None = None) -> None:
        """Runs what is left before the slot, and the slot's first step. None: all that is left."""
        if slot is None:
            end = len(self._steps)
        else:
            end = min(self._places(slot), default=-1) + 1
        while self._num_forward < end:
            self._forward(self._steps[self._num_forward])
            self._num_forward += 1

    def output(self) -> Tensor:
        """What the chunk gives, to be taken once, after its last step."""
        assert self._num_forward == len(self._steps), f"{self._num_forward} of {len(self._steps)} steps have run"
        state, self._state = self._state, None
        if isinstance(state, CutTensor):
            self._last = state.crossing
            return state.data
        assert isinstance(state, Tensor), f"a chunk gives one tensor, not {type(state).__name__}"
        return state

    def begin_backward(self, gradient: Tensor | None) -> None:
        """`gradient`: of the output; None: the output is the scalar to differentiate."""
        assert self._last is not None, "nothing in this chunk has a gradient"
        if gradient is not None:
            self._last.add(gradient)

    def backward(self, slot: Slot | None = None) -> None:
        """Backward of what is left behind the slot, and of the slot's last step. None: of all that is left."""
        start = 0 if slot is None else max(self._places(slot), default=len(self._made))
        while len(self._made) > start:
            self._backward(self._steps[len(self._made) - 1], self._made.pop())

    def input_gradient(self) -> Tensor:
        """Of what was received, after the last backward."""
        gradient, self._received.gradient = self._received.gradient, None
        assert gradient is not None, "what was received has no gradient"
        return gradient

    def _places(self, slot: Slot) -> list[int]:
        """Indices of the steps of a slot: none, one, or two for an exchange. A dense layer has no exchanges."""
        return [i for i, step in enumerate(self._steps) if (step.node, step.layer) == (slot.node, slot.layer)]

    def _forward(self, step: Step) -> None:
        streams = self._streams
        with streams.on(step.stream):
            streams.wait(self._last_step)
            passage = SegmentIO(streams.record_use)
            state, self._state = passage.enter(self._state), None
            self._state = passage.leave(step.run(state))
            self._last_step = streams.record()
        self._made.append(passage.left)

    def _backward(self, step: Step, made: list[GradBoundary]) -> None:
        streams = self._streams
        with streams.on(step.stream):
            streams.wait(self._last_step)
            reached = [crossing for crossing in made if crossing.gradient is not None or crossing is self._last]
            for crossing in reached:
                if crossing.gradient is not None:
                    streams.record_use(crossing.gradient)
            if reached:
                edges = tuple(crossing.edge for crossing in reached if crossing.edge is not None)
                torch.autograd.backward(edges, tuple(crossing.gradient for crossing in reached))
            for crossing in made:
                crossing.edge = crossing.gradient = None
            self._last_step = streams.record()
