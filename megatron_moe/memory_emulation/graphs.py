"""Emulates the memory of CUDA graphs: captured work runs once and allocates from a pool that never shrinks."""

import gc
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder, Work
from megatron_moe.memory_emulation.tracker import Tracker


class EmulatedGraphRecorder(CudaGraphRecorder):
    """Runs captured work on `meta` tensors, which the tracker counts in a pool. Replays allocate nothing."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._numbers = count()

    def pool(self) -> Any:
        """Creates a pool and returns its number."""
        return next(self._numbers)

    def capture(self, work: Work, pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        with self._tracker.in_pool(pool):
            buffers = list(map(torch.empty_like, inputs))
            outputs = work(*buffers)
        return _EmulatedGraph(list(map(self.alias, buffers)), outputs)

    def alias(self, tensor: Tensor) -> Tensor:
        alias = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._tracker.ignore(alias)
        return alias

    def empty_cache(self) -> None:
        gc.collect()

    def pool_bytes(self, pools: Sequence[Any]) -> int:
        """Memory of the pools so far, in bytes."""
        return self._tracker.timeline().pool_bytes(pools)


class _EmulatedGraph(CapturedGraph):
    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.has_aliases = False

    def replay(self) -> None:
        """Does nothing: the outputs have no values."""
