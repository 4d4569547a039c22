"""Pool of graph instances. Each instance holds the captured CUDA graphs and memory pool of one microbatch in flight."""

from collections.abc import Iterator
from functools import partial

from megatron_moe.memory.cuda_graphs.capture import CudaGraphRecorder
from megatron_moe.memory.cuda_graphs.layer_graphs import GraphInstance


class GraphInstancePool:
    """Graph instances of this rank's model chunks. A microbatch in flight (between forward and backward) uses one
    instance per chunk. The first `warmup` steps run eagerly, so that kernels are compiled before the capture."""

    def __init__(self, recorder: CudaGraphRecorder, warmup: int, *, defers_weight_grads: bool = False) -> None:
        """`defers_weight_grads`: the schedule computes weight gradients later than input gradients."""
        self._recorder = recorder
        self._defers_weight_grads = defers_weight_grads
        self._warmup = warmup
        self._num_steps = 0
        self._free: dict[int, list[GraphInstance]] = {}
        """Chunk index -> idle instances, with the most recently used instance last."""
        self._in_use: dict[tuple[int, int], GraphInstance] = {}
        """(microbatch, chunk) -> instance in use."""

    def begin_step(self) -> None:
        """Called before every training step. Before the first captured step, it frees memory cached by eager steps."""
        assert not self._in_use, f"microbatches in flight between steps, as (microbatch, chunk): {sorted(self._in_use)}"
        self._num_steps += 1
        if self._num_steps == self._warmup + 1:
            self._recorder.empty_cache()

    def discard(self) -> None:
        """Destroys all graphs, because shapes change. The next step runs eagerly, so that kernels for the new shapes
        are compiled; the step after it is captured. All ranks must call it between the same steps."""
        assert not self._in_use, f"microbatches in flight between steps, as (microbatch, chunk): {sorted(self._in_use)}"
        self._free.clear()
        self._num_steps = min(self._num_steps, self._warmup - 1)

    def take(self, microbatch: int, chunk: int) -> GraphInstance | None:
        """Takes an idle or new instance for the forward and backward of a microbatch. Returns None during warm-up."""
        if self._num_steps <= self._warmup:
            return None
        free = self._free.setdefault(chunk, [])
        new = partial(GraphInstance, self._recorder, defers_weight_grads=self._defers_weight_grads)
        instance = free.pop() if free else new()
        self._in_use[microbatch, chunk] = instance
        return instance

    def give_back(self, microbatch: int, chunk: int) -> None:
        """Makes the instance of a microbatch idle again, after the backward. Does nothing during warm-up."""
        instance = self._in_use.pop((microbatch, chunk), None)
        if instance is not None:
            instance.end_microbatch()
            self._free[chunk].append(instance)

    def of(self, chunk: int) -> tuple[GraphInstance, ...]:
        """All instances of a chunk. Must be called between steps, when all instances are idle."""
        return tuple(self._free.get(chunk, ()))

    def __iter__(self) -> Iterator[GraphInstance]:
        for chunk in self._free:
            yield from self.of(chunk)

    def summary(self) -> str | None:
        """Formats the number of graphs and their memory; None before the end of the first step with graphs."""
        if self._num_steps <= self._warmup or self._in_use:
            return None
        instances = list(self)
        num_graphs = sum(instance.num_graphs for instance in instances)
        static_bytes = sum(instance.static_bytes for instance in instances)
        memory = self._recorder.memory_summary([pool for each in instances for pool in each.pools], static_bytes)
        return f"CUDA graphs: {num_graphs} captured for {len(instances)} microbatches in flight; {memory}"
