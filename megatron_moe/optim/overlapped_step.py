"""The optimizer's update, bucket by bucket, beside the forward that follows it.

An update moves memory and computes little; a forward computes. On a GPU the update is a stream of its own, in the
order in which the forward needs the weights, and the forward waits for each bucket where it first reads it. Nothing but
the order of work changes: all numbers are those of an update in one go. A backward writes gradients of a layer whose
forward has waited for the update that reads them.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.cpu_offload import Update, apply
from megatron_moe.optim.param_gather import WeightGather
from megatron_moe.optim.state import AdamState

Mark = Any
"""A point in the work of the side stream."""


class SideStream:
    """The side of a CPU: work is done when it is launched, and all of this is nothing."""

    def begin(self) -> AbstractContextManager[object]:
        """What the body launches goes beside what the device is given afterwards, and comes after what it has."""
        return nullcontext()

    def mark(self) -> Mark:
        """The end of what the current stream was given so far."""
        return None

    def wait(self, mark: Mark) -> None:
        """What the current stream is given from now on comes after the mark."""


class CudaSideStream(SideStream):
    """The side of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return torch.cuda.current_stream().record_event()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(mark)


def side_stream_of(device: torch.device) -> SideStream:
    """The side of a device, to be made once per run."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()


class UpdatePiece(NamedTuple):
    """A stretch of a state that lies in one bucket, in elements of the state."""

    state: AdamState
    start: int
    end: int


class OverlappedOptimizerStep:
    """Updates under way (`sharded.Arrivals`).

    Args:
        buckets: what this rank steps of every bucket, in forward order.
        gather: takes the new weights of a bucket to the other ranks when it is stepped; None: there are no others.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[UpdatePiece]],
        config: OptimizerConfig,
        kernels: Kernels,
        side: SideStream,
        gather: WeightGather | None,
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._config = config
        self._kernels = kernels
        self._side = side
        self._gather = gather
        self._update: Update | None = None
        """Its scalars are read on the side until all marks are passed."""
        self._marks: dict[int, Mark] = {}

    def start(self, update: Update) -> None:
        """Launches the update of all buckets."""
        assert not self._marks, f"{len(self._marks)} buckets of the last update were never waited for"
        self._update = update
        with self._side.begin():
            for number, bucket in enumerate(self._buckets):
                for piece in bucket:
                    self._apply(update, piece)
                if self._gather is not None:
                    self._gather.start_bucket(number)
                self._marks[number] = self._side.mark()

    def acquire(self, buckets: Iterable[int]) -> None:
        """See `Arrivals`."""
        if not self._marks:
            return
        for number in buckets:
            if number in self._marks:
                self._side.wait(self._marks.pop(number))
                if self._gather is not None:
                    self._gather.acquire((number,))
        if not self._marks:
            self._update = None

    def finish(self) -> None:
        """See `Arrivals`."""
        self.acquire(range(len(self._buckets)))

    def _apply(self, update: Update, piece: UpdatePiece) -> None:
        state, start, end = piece
        kept, weights, grads = state.kept.part(start, end), state.weights[start:end], state.grads[start:end]
        apply(update, self._config, self._kernels, state, kept, weights, grads, state.start + start)


def pieces_of(states: Iterable[AdamState], start: int, end: int) -> list[UpdatePiece]:
    """What states of one buffer hold of its elements `start` to `end`."""
    inside = [(state, max(start, state.start), min(end, state.end)) for state in states]
    return [
        UpdatePiece(state, first - state.start, last - state.start) for state, first, last in inside if first < last
    ]
