"""Pool of CUDA-graph instances: one memory pool and set of captured graphs per in-flight microbatch."""

from collections.abc import Iterator

from megatron_moe.memory.cuda_graphs.capture import CudaGraphRecorder
from megatron_moe.memory.cuda_graphs.layer_graphs import GraphInstance


class GraphInstancePool:
    """Graph instances of every model chunk on this rank, one for each microbatch in flight (between forward and
    backward). The first `warmup` steps run eagerly, so that kernels are compiled before the capture."""

    def __init__(self, recorder: CudaGraphRecorder, warmup: int) -> None:
        self._recorder = recorder
        self._warmup = warmup
        self._num_steps = 0
        self._free: dict[int, list[GraphInstance]] = {}
        """Idle instances per chunk, the most recently used one last."""
        self._in_use: dict[tuple[int, int], GraphInstance] = {}
        """Instances in use per (microbatch, chunk)."""

    def begin_step(self) -> None:
        """Called before every training step."""
        assert not self._in_use, f"in flight between steps (microbatch, chunk): {sorted(self._in_use)}"
        self._num_steps += 1
        if self._num_steps == self._warmup + 1:
            self._recorder.empty_cache()

    def take(self, microbatch: int, chunk: int) -> GraphInstance | None:
        """Instance for the forward and backward of a microbatch; None during warm-up."""
        if self._num_steps <= self._warmup:
            return None
        free = self._free.setdefault(chunk, [])
        instance = free.pop() if free else GraphInstance(self._recorder)
        self._in_use[microbatch, chunk] = instance
        return instance

    def give_back(self, microbatch: int, chunk: int) -> None:
        """Returns the instance of a microbatch after its backward."""
        instance = self._in_use.pop((microbatch, chunk), None)
        if instance is not None:
            self._free[chunk].append(instance)

    def of(self, chunk: int) -> tuple[GraphInstance, ...]:
        """All instances of a chunk. Only valid between steps, when all instances are idle."""
        return tuple(self._free.get(chunk, ()))

    def __iter__(self) -> Iterator[GraphInstance]:
        for chunk in self._free:
            yield from self.of(chunk)

    def summary(self) -> str | None:
        """Number of graphs and their memory; None before the end of the first step with graphs."""
        if self._num_steps <= self._warmup or self._in_use:
            return None
        instances = list(self)
        num_graphs = sum(instance.num_graphs for instance in instances)
        static_bytes = sum(instance.static_bytes for instance in instances)
        memory = self._recorder.memory_summary([instance.pool for instance in instances], static_bytes)
        return f"CUDA graphs: {num_graphs} captured for {len(instances)} microbatches in flight; {memory}"
