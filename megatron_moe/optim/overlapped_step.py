"""The optimizer's update, bucket by bucket, beside the forward that follows it.

An update moves memory and computes little; a forward computes. On a GPU the update is a stream of its own, in the
order in which the forward needs the weights, and the forward waits for each bucket where it first reads it. Nothing but
the order of work changes: all numbers are those of an update in one go. A backward writes gradients of a layer whose
forward has waited for the update that reads them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.cpu_offload import Update, apply
from megatron_moe.optim.param_gather import WeightGather
from megatron_moe.optim.state import AdamState
from megatron_moe.parallel.streams import Event, Streams


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
        streams: Streams,
        gather: WeightGather | None,
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._config = config
        self._kernels = kernels
        self._streams = streams
        self._gather = gather
        self._update: Update | None = None
        """Kept until all events are reached, because the optimizer's stream reads its scalars."""
        self._events: dict[int, Event] = {}

    def start(self, update: Update) -> None:
        """Launches the update of all buckets."""
        assert not self._events, f"{len(self._events)} buckets of the last update were never waited for"
        self._update = update
        with self._streams.fork("optimizer"):
            for number, bucket in enumerate(self._buckets):
                for piece in bucket:
                    self._apply(update, piece)
                if self._gather is not None:
                    self._gather.start_bucket(number)
                self._events[number] = self._streams.record()

    def acquire(self, buckets: Iterable[int]) -> None:
        """See `Arrivals`."""
        if not self._events:
            return
        for number in buckets:
            if number in self._events:
                self._streams.wait(self._events.pop(number))
                if self._gather is not None:
                    self._gather.acquire((number,))
        if not self._events:
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
