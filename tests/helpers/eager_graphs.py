"""Stand-ins for CUDA graphs on a CPU: a replay runs the work again and copies its outputs to those of the first run, or
runs recorded torch ops again.

As in torch, no graph can be captured into a pool whose graphs have all been destroyed.
"""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class TapeRecorder(EagerRecorder):
    """Records the torch ops of captured work once. Like a CUDA graph, a replay runs them again on the same tensors and
    no Python code. Work that reads tensors on the host or copies constants from it cannot be captured."""

    def capture(self, work: Work, pool: Any) -> CapturedGraph:
        return _Tape(work)


class _Tape(CapturedGraph, TorchDispatchMode):
    _HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default)

    def __init__(self, work: Work) -> None:
        TorchDispatchMode.__init__(self)
        self._calls: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        """Op, arguments, and its new tensors with their places in the result."""
        self._before: list[tuple[Tensor, Tensor]] = []
        with self:
            self.outputs = work()
        for tensor, value in reversed(self._before):  # a capture does not run its work
            tensor.copy_(value)
        self._before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self._HOST, f"{func} reads or writes host memory"
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            self._before += [(tensor.detach(), tensor.detach().clone()) for tensor in inputs]
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        places = enumerate(tree_leaves(result))
        new = [(each, place) for place, each in places if isinstance(each, Tensor)]
        new = [(each.detach(), place) for each, place in new if each.untyped_storage().data_ptr() not in known]
        self._calls.append((func, args, kwargs or {}, new))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, new in self._calls:
                result = tree_leaves(func(*args, **kwargs))
                for tensor, place in new:
                    tensor.copy_(result[place])
