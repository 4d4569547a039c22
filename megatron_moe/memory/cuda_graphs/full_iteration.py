"""Forward and backward of all microbatches of a step, recorded once and replayed (a CUDA graph of the whole step)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe.data.batch import MicroBatch
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.memory.cuda_graphs.capture import Capture, Recorder
from megatron_moe.memory.cuda_graphs.layer_graphs import MIB, MetricRecorder, StaticGradAccumulator, static_context
from megatron_moe.memory.pytree import Form, flatten, unflatten

Work = Callable[[Sequence[MicroBatch]], Tensor]
"""Leaves the gradients of the microbatches in the sinks; gives the sums that the step needs."""


class FullIterationGraph:
    """Recordings of steps: one for every number and form of microbatches that occurs.

    The first `warmup` steps are computed. Gradients of all sinks must have been forgotten before a step.
    """

    def __init__(self, recorder: Recorder, warmup: int, sinks: Sequence[StaticGradAccumulator]) -> None:
        self._recorder = recorder
        self._pool: Any = recorder.pool()
        self._warmup = warmup
        self._sinks = tuple(sinks)
        self._num_steps = 0
        self._num_landing_bytes = 0
        self._recorded: dict[Form, _Recorded] = {}

    def run(self, batches: Sequence[MicroBatch], work: Work, metrics: MetricAccumulator) -> Tensor:
        """What `work(batches)` gives."""
        self._num_steps += 1
        if self._num_steps <= self._warmup:
            return work(batches)
        plain = tuple(replace(batch, context=static_context(batch.context)) for batch in batches)
        tensors, form = flatten(plain)
        if form not in self._recorded:
            self._recorder.make_room()
            self._num_landing_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._recorded[form] = _Recorded(plain, tensors, partial(self._recorder.record, pool=self._pool))
        return self._recorded[form].run(tensors, work, self._sinks, metrics)

    @property
    def has_recorded(self) -> bool:
        """The first step that records is over."""
        return bool(self._recorded)

    def summary(self) -> str:
        """How many recordings there are, and what they cost."""
        memory = self._recorder.bytes_in([self._pool])
        return (
            f"CUDA graphs: {len(self._recorded)} of whole steps; their pool holds {memory / MIB:,.0f} MiB, and what is "
            f"copied in {self._num_landing_bytes / MIB:,.0f} MiB"
        )


@dataclass(eq=False)
class _Recorded:
    """One form of a step."""

    plain: tuple[MicroBatch, ...]
    tensors: Sequence[Tensor]
    record: Callable[[Callable[[], Sequence[Tensor]]], Capture]

    def __post_init__(self) -> None:
        self._kept = [torch.empty_like(tensor) for tensor in self.tensors]
        self._batches: tuple[MicroBatch, ...] = unflatten(self.plain, self.tensors, self._kept)
        self._notes = MetricRecorder()
        self._recording: Capture | None = None
        self._filled: list[StaticGradAccumulator] = []

    def run(
        self, tensors: Sequence[Tensor], work: Work, sinks: Sequence[StaticGradAccumulator], metrics: MetricAccumulator
    ) -> Tensor:
        for kept, tensor in zip(self._kept, tensors, strict=True):
            kept.copy_(tensor)
        if self._recording is None:
            self._recording = self.record(lambda: self._work(work))
        self._recording.replay()
        if not self._filled:
            self._filled = [sink for sink in sinks if sink.filled]
        for sink in self._filled:
            sink.filled = True
        sums, *noted = self._recording.made
        self._notes.tell(metrics, noted)
        return sums.clone()

    def _work(self, work: Work) -> list[Tensor]:
        self._notes = notes = MetricRecorder()
        batches = [replace(batch, context=replace(batch.context, metrics=notes)) for batch in self._batches]
        return [work(batches), *notes.tensors]
