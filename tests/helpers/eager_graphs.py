"""Stand-in for CUDA graphs on a CPU: a replay runs the work again and copies its outputs to those of the first run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder, Work


class EagerRecorder(CudaGraphRecorder):
    def __init__(self) -> None:
        """Has no stream."""

    def pool(self) -> Any:
        return object()

    def capture(self, work: Work, pool: Any) -> CapturedGraph:
        return _EagerGraph(work)

    def empty_cache(self) -> None:
        pass

    def pool_bytes(self, pools: Sequence[Any]) -> int:
        return 0


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
