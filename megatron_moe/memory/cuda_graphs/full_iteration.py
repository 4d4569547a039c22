"""Full-iteration CUDA graph: one graph runs forward and backward of all microbatches of a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.data.batch import MicroBatch
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder
from megatron_moe.memory.cuda_graphs.graph_metrics import MetricRecorder
from megatron_moe.memory.cuda_graphs.layer_graphs import StaticGradAccumulator, static_context
from megatron_moe.parallel.pytree import TreeSpec, flatten, unflatten

Work = Callable[[Sequence[MicroBatch]], Tensor]
"""Runs forward and backward of all microbatches and returns this rank's sum of losses and number of tokens."""


class FullIterationGraph:
    """Captures and replays whole steps, with one graph per combination of number, shapes and dtypes of microbatches.

    The first `warmup` steps run eagerly. The gradient `accumulators` must have been reset before every step.
    """

    def __init__(self, recorder: CudaGraphRecorder, warmup: int, accumulators: Sequence[StaticGradAccumulator]) -> None:
        self._recorder = recorder
        self._pool: Any = recorder.pool()
        self._warmup = warmup
        self._accumulators = tuple(accumulators)
        self._num_steps = 0
        self._captured: dict[TreeSpec, _CapturedStep] = {}

    def run(self, batches: Sequence[MicroBatch], work: Work, metrics: MetricAccumulator) -> Tensor:
        """Returns `work(batches)`, computed eagerly during warm-up and by graph replay afterwards."""
        self._num_steps += 1
        if self._num_steps <= self._warmup:
            return work(batches)
        inputs = tuple(map(_static, batches))
        tensors, spec = flatten(inputs)
        if spec not in self._captured:
            self._recorder.empty_cache()
            self._captured[spec] = _CapturedStep(inputs, tensors)
        step = self._captured[spec]
        for static, tensor in zip(step.static_inputs, tensors, strict=True):
            static.copy_(tensor)
        if step.graph is None:
            traced = metrics.trace_routing is not None
            step.graph = self._recorder.capture(lambda: step.compute(work, traced=traced), self._pool)
        step.graph.replay()
        if not step.filled:
            step.filled = [accumulator for accumulator in self._accumulators if accumulator.filled]
        for accumulator in step.filled:
            accumulator.filled = True
        sums, *recorded = step.graph.outputs
        step.metrics.replay(metrics, recorded)
        return sums.clone()

    def discard(self) -> None:
        """Destroys all graphs, because shapes change. The next step runs eagerly, so that kernels for the new shapes
        are compiled; the step after it is captured. All ranks must call it between the same steps."""
        self._captured.clear()
        # torch captures nothing into a pool whose graphs have been destroyed, so a new pool is needed
        self._pool = self._recorder.pool()
        self._num_steps = min(self._num_steps, self._warmup - 1)

    def summary(self) -> str | None:
        """Formats the number of graphs and their memory; None before the first capture."""
        if not self._captured:
            return None
        static_bytes = sum(tensor.nbytes for step in self._captured.values() for tensor in step.static_inputs)
        memory = self._recorder.memory_summary([self._pool], static_bytes)
        return f"CUDA graphs: {len(self._captured)} of full iterations; {memory}"


def _static(batch: MicroBatch) -> MicroBatch:
    """Returns a copy of the batch without the fields that a graph must not depend on. Its RNG key is replaced by a key
    that is the same in every step but differs between microbatches, because recomputed forwards look up values that the
    first forward of the microbatch stored under its key."""
    whole = None if batch.whole is None else _static(batch.whole)
    key = batch.context.rng and batch.context.rng._replace(iteration=0)
    return replace(batch, context=replace(static_context(batch.context), rng=key), whole=whole)


class _CapturedStep:
    """Graph of a step and its static inputs, for one structure of the microbatches (number, shapes, dtypes)."""

    def __init__(self, inputs: tuple[MicroBatch, ...], tensors: Sequence[Tensor]) -> None:
        self.static_inputs = [torch.empty_like(tensor) for tensor in tensors]
        self.graph: CapturedGraph | None = None
        self.metrics = MetricRecorder()
        self.filled: list[StaticGradAccumulator] = []
        """Accumulators to which the graph adds gradients."""
        self._batches: tuple[MicroBatch, ...] = unflatten(inputs, tensors, self.static_inputs)

    def compute(self, work: Work, *, traced: bool) -> list[Tensor]:
        """Runs `work` on the static inputs. `traced`: whether the metrics include a routing trace."""
        self.metrics = metrics = MetricRecorder(with_routing=traced)
        batches = [replace(batch, context=replace(batch.context, metrics=metrics)) for batch in self._batches]
        return [work(batches), *metrics.pop_tensors()]
