"""Which memory of recordings a microbatch uses while it is in flight, from its forward to the end of its backward."""

from collections.abc import Iterator

from megatron_moe.memory.cuda_graphs.capture import Recorder
from megatron_moe.memory.cuda_graphs.layer_graphs import MIB, GraphInstance


class GraphInstancePool:
    """The flights of every chunk of the model on this rank: as many as the schedule has microbatches between forward
    and backward there. The first `warmup` steps are computed, so that nothing is recorded for the first time that it
    runs."""

    def __init__(self, recorder: Recorder, warmup: int) -> None:
        self._recorder = recorder
        self._warmup = warmup
        self._num_steps = 0
        self._free: dict[int, list[GraphInstance]] = {}
        """By chunk, the one that was used last at the end."""
        self._taken: dict[tuple[int, int], GraphInstance] = {}

    def begin_step(self) -> None:
        """Of training."""
        assert not self._taken, f"in flight between steps (microbatch, chunk): {sorted(self._taken)}"
        self._num_steps += 1
        if self._num_steps == self._warmup + 1:
            self._recorder.make_room()

    def take(self, microbatch: int, chunk: int) -> GraphInstance | None:
        """For the forward and backward of a microbatch; None while things warm up."""
        if self._num_steps <= self._warmup:
            return None
        free = self._free.setdefault(chunk, [])
        flight = free.pop() if free else GraphInstance(self._recorder)
        self._taken[microbatch, chunk] = flight
        return flight

    def give_back(self, microbatch: int, chunk: int) -> None:
        """After the backward."""
        flight = self._taken.pop((microbatch, chunk), None)
        if flight is not None:
            self._free[chunk].append(flight)

    def of(self, chunk: int) -> tuple[GraphInstance, ...]:
        """All flights of a chunk. Between steps."""
        return tuple(self._free.get(chunk, ()))

    def __iter__(self) -> Iterator[GraphInstance]:
        for chunk in self._free:
            yield from self.of(chunk)

    @property
    def has_recorded(self) -> bool:
        """The first step that records is over."""
        return self._num_steps > self._warmup and not self._taken

    def summary(self) -> str:
        """How many recordings there are, and what they cost."""
        graph_instances = list(self)
        memory = self._recorder.bytes_in([flight.pool for flight in graph_instances])
        landed = sum(flight.num_landing_bytes for flight in graph_instances)
        number = sum(flight.num_recordings for flight in graph_instances)
        return (
            f"CUDA graphs: {number} recorded for {len(graph_instances)} microbatches in flight; their pools hold "
            f"{memory / MIB:,.0f} MiB, and what is copied in {landed / MIB:,.0f} MiB"
        )
