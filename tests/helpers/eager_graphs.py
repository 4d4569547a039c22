"""Stand-in for CUDA graphs on a CPU: a replay runs the work again and copies its outputs to those of the first run.

As in torch, no graph can be captured into a pool whose graphs have all been destroyed.
"""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder, Work


class EagerRecorder(CudaGraphRecorder):
    def __init__(self) -> None:
        """Has no stream."""

    def pool(self) -> Any:
        return _Pool()

    def capture(self, work: Work, pool: Any) -> CapturedGraph:
        assert pool.graphs or not pool.was_used, "all graphs of this pool have been destroyed"
        graph = _EagerGraph(work)
        pool.graphs.add(graph)
        pool.was_used = True
        return graph

    def empty_cache(self) -> None:
        gc.collect()  # a destroyed graph and its work refer to each other

    def pool_bytes(self, pools: Sequence[Any]) -> int:
        return 0


class _Pool:
    def __init__(self) -> None:
        self.graphs: WeakSet[_EagerGraph] = WeakSet()
        self.was_used = False


class _EagerGraph(CapturedGraph):
    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs: Sequence[Tensor] = ()
        self._ran = False

    def replay(self) -> None:
        outputs = self._work()
        if not self._ran:
            self.outputs, self._ran = [tensor.clone() for tensor in outputs], True
            return
        with torch.no_grad():
            for static, tensor in zip(self.outputs, outputs, strict=True):
                static.copy_(tensor)
