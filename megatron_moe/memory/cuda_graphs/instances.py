"""CUDA graphs of a rank: instances for its model chunks in the memory slots of the schedule."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_moe.memory.cuda_graphs.capture import CudaGraphRecorder
from megatron_moe.memory.cuda_graphs.layer_graphs import GraphInstance, GraphPools, StaticContexts
from megatron_moe.pipeline.slots import At


@dataclass(eq=False)
class _Slot:
    """Memory slot of one microbatch in flight, which is reused by later microbatches."""

    pools: GraphPools
    contexts: StaticContexts = field(default_factory=StaticContexts)
    instances: dict[int, GraphInstance] = field(default_factory=dict)
    """Model chunk -> its graphs in this slot."""
    user: At | None = None
    """(microbatch, chunk) between its forward and the end of its backward; None if the slot is free."""


class GraphInstancePool:
    """Graph instances of this rank's model chunks. A microbatch in flight (between forward and backward) occupies a
    memory slot and replays the instance of its chunk in this slot. The first `warmup` steps run eagerly, so that
    kernels are compiled before the capture."""

    def __init__(
        self,
        recorder: CudaGraphRecorder,
        warmup: int,
        *,
        defers_weight_grads: bool = False,
        one_in_flight: bool = True,
        copies_input_grads: bool = False,
    ) -> None:
        """`defers_weight_grads`: the schedule computes weight gradients later than input gradients. `one_in_flight`:
        every forward is followed by its backward. `copies_input_grads`: see `GraphInstance`."""
        self._recorder = recorder
        self._warmup = warmup
        self._defers_weight_grads = defers_weight_grads
        self._one_in_flight = one_in_flight
        self._copies_input_grads = copies_input_grads
        self._num_steps = 0
        self._assigned: Mapping[At, int] = {}
        self._slots: list[_Slot] = []

    def begin_step(self, slots: Mapping[At, int]) -> None:
        """Called before every training step with the memory slots of its schedule (`pipeline.slots.memory_slots`).
        Before the first captured step, it frees memory cached by eager steps."""
        self._check_free()
        self._assigned = slots
        self._num_steps += 1
        if self._num_steps == self._warmup + 1:
            self._recorder.empty_cache()

    def discard(self) -> None:
        """Destroys all graphs, because shapes change. The next step runs eagerly, so that kernels for the new shapes
        are compiled; the step after it is captured. All ranks must call it between the same steps."""
        self._check_free()
        self._slots.clear()
        self._num_steps = min(self._num_steps, self._warmup - 1)

    def acquire(self, microbatch: int, chunk: int) -> GraphInstance | None:
        """Returns the instance for the forward and backward of a microbatch, or None during warm-up."""
        if self._num_steps <= self._warmup:
            return None
        number = self._assigned[microbatch, chunk]
        while len(self._slots) <= number:
            self._slots.append(_Slot(self._pools()))
        slot = self._slots[number]
        assert slot.user is None, f"memory slot {number} still belongs to (microbatch, chunk) {slot.user}"
        slot.user = microbatch, chunk
        if chunk not in slot.instances:
            slot.instances[chunk] = GraphInstance(
                self._recorder,
                slot.pools,
                slot.contexts,
                defers_weight_grads=self._defers_weight_grads,
                copies_input_grads=self._copies_input_grads,
            )
        return slot.instances[chunk]

    def release(self, microbatch: int, chunk: int) -> None:
        """Frees the slot of a microbatch after its backward. Does nothing during warm-up."""
        if self._num_steps > self._warmup:
            slot = self._slots[self._assigned[microbatch, chunk]]
            slot.instances[chunk].end_microbatch()
            slot.user = None

    def __iter__(self) -> Iterator[GraphInstance]:
        for slot in self._slots:
            yield from slot.instances.values()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def summary(self) -> str | None:
        """Formats the number of graphs and their memory; None before the end of the first step with graphs."""
        if self._num_steps <= self._warmup or any(slot.user is not None for slot in self._slots):
            return None
        pools = list(dict.fromkeys(pool for slot in self._slots for pool in slot.pools))
        memory = self._recorder.memory_summary(pools, sum(slot.contexts.num_bytes for slot in self._slots))
        num_graphs = sum(instance.num_graphs for instance in self)
        return f"CUDA graphs: {num_graphs} captured for {self.num_slots} microbatches in flight; {memory}"

    def _pools(self) -> GraphPools:
        """Creates the pools of a new slot, which shares the pools of backwards with the other slots. After `discard`
        all pools are new, because torch captures nothing into a pool whose graphs have been destroyed."""
        forward = self._recorder.pool()
        if self._slots:
            return self._slots[0].pools._replace(forward=forward)
        backward = forward if self._one_in_flight else self._recorder.pool()
        return GraphPools(forward, backward, self._recorder.pool() if self._defers_weight_grads else backward)

    def _check_free(self) -> None:
        users = [slot.user for slot in self._slots if slot.user is not None]
        assert not users, f"microbatches in flight between steps, as (microbatch, chunk): {sorted(users)}"
