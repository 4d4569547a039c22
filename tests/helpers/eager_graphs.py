"""Stand-ins for CUDA graphs on a CPU. A replay reruns the captured function and copies its outputs to the static ones,
or reruns the recorded torch ops.

As in torch, no graph can be captured into a pool whose graphs have all been destroyed.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder, Work


class EagerRecorder(CudaGraphRecorder):
    def __init__(self) -> None:
        """Creates a stand-in without a stream."""

    def pool(self) -> Any:
        return _Pool()

    def capture(self, work: Work, pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        assert pool.graphs or not pool.was_used, "all graphs of this pool have been destroyed"
        graph = _EagerGraph(work, list(map(torch.empty_like, inputs)))
        pool.graphs.add(graph)
        pool.was_used = True
        return graph

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def empty_cache(self) -> None:
        gc.collect()  # a destroyed graph and its captured function form a reference cycle

    def pool_bytes(self, pools: Sequence[Any]) -> int:
        return 0


class _Pool:
    def __init__(self) -> None:
        self.graphs: WeakSet[_EagerGraph] = WeakSet()
        self.was_used = False
        self.tapes: list[_Tape] = []


class _EagerGraph(CapturedGraph):
    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self._work = work
        self.inputs = inputs
        self.outputs: Sequence[Tensor] = ()
        self.has_aliases = False
        self._ran = False

    def replay(self) -> None:
        outputs = self._work(*self.inputs)
        if not self._ran:
            self.outputs, self._ran = [tensor.clone() for tensor in outputs], True
            return
        with torch.no_grad():
            for static, tensor in zip(self.outputs, outputs, strict=True):
                static.copy_(tensor)


class TapeRecorder(EagerRecorder):
    """Recorder of torch ops, which a replay reruns on the same tensors without Python code, like a CUDA graph.

    It detects more errors than a GPU does:

    - An error is raised if captured work reads tensors on the host or copies constants from it.
    - An error is raised if a graph's external input or output was freed before a replay.
    - Results are NaN if memory of a pool is still needed when a graph that may reuse it is replayed.
    """

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        """Number of references of all tapes to each storage."""
        self._pooled: set[int] = set()
        """Storages that graphs have allocated."""

    def capture(self, work: Work, pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        tapes = [] if pool is None else pool.tapes
        free = [storage for each in tapes for storage in each.freed()]
        tape = _Tape(work, free, self._held, self._pooled, inputs)
        tapes.append(tape)
        return tape

    def alias(self, tensor: Tensor) -> Tensor:
        return _alias(tensor, self._held)


def leaves(values: Iterable[Any]) -> list[Any]:
    """Arguments or results of an op without their lists. The function of torch takes more time than the op."""
    found: list[Any] = []
    for each in values:
        found += leaves(each) if isinstance(each, list | tuple) else (each,)
    return found


def _alias(tensor: Tensor, held: Counter[int]) -> Tensor:
    """Creates an alias that autograd treats as unrelated to `tensor`, like a tensor made from an address.

    The reference of the alias is counted in `held`.
    """
    storage = tensor.untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    held[storage._cdata] += 1
    weakref.finalize(alias, held.subtract, [storage._cdata]).atexit = False
    return alias


class _Tape(CapturedGraph, TorchDispatchMode):
    _HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default)

    def __init__(
        self, work: Work, reusable: Sequence[Tensor], held: Counter[int], pooled: set[int], inputs: Sequence[Tensor]
    ) -> None:
        """`reusable`: memory of the pool that is free now, so that the graph may allocate it. `held`: number of
        references of tapes and aliases per storage, by the address of the storage object. `pooled`: storages of all
        graphs. `inputs`: layouts of the static inputs."""
        TorchDispatchMode.__init__(self)
        self._calls: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        """(op, positional arguments, keyword arguments, new tensors with their indices in the result) of each call."""
        self._before: list[tuple[Tensor, Tensor]] = []
        self._own: dict[int, Tensor] = {}
        """One tensor per storage that the graph allocates, by the address of the storage object."""
        self._foreign: dict[int, Tensor] = {}
        """One tensor per storage that no graph has allocated."""
        self._held = held
        self._references: Counter[int] = Counter()
        """References that this tape holds, by the address of the storage."""
        self._reusable, self._pooled = reusable, pooled
        self.has_aliases = False
        buffers = list(map(torch.empty_like, inputs))
        self.inputs = [_alias(self._hold(buffer, self._own), held) for buffer in buffers]
        with self:
            self.outputs = work(*buffers)
        del buffers
        for tensor, value in reversed(self._before):  # a capture does not run its work
            tensor.copy_(value)
        self._before.clear()

    def __del__(self) -> None:
        self._held.subtract(self._references)
        self._pooled.difference_update(self._own)

    def freed(self) -> list[Tensor]:
        """Tensors of the graph's storages that only tapes refer to."""
        return [tensor for tensor in self._own.values() if not self._is_used(tensor)]

    def _is_used(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()  # holding this object adds a reference
        return torch._C._storage_Use_Count(storage._cdata) - 1 > self._held[storage._cdata]

    def _hold(self, tensor: Tensor, among: dict[int, Tensor]) -> Tensor:
        """Creates an alias that keeps a tensor's storage alive, but not its autograd graph or Python object."""
        key, alias = tensor.untyped_storage()._cdata, tensor.detach()
        self._held[key] += 1
        self._references[key] += 1
        if among is self._own:
            self._pooled.add(key)
        if among is self._own or key not in self._pooled:
            among.setdefault(key, alias)
        return alias

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `megatron_moe/memory_emulation/tracker.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self._HOST, f"{func} reads or writes host memory"
        kwargs = kwargs or {}
        inputs = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            self._before += [(tensor.detach(), tensor.detach().clone()) for tensor in inputs]
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        places = enumerate(leaves((result,)))
        new = [(each, place) for place, each in places if isinstance(each, Tensor)]
        new = [(each, place) for each, place in new if each.untyped_storage()._cdata not in known]
        held = [(self._hold(each, self._own), place) for each, place in new]
        kept = [self._kept(each) for each in args], {name: self._kept(each) for name, each in kwargs.items()}
        self._calls.append((func, *kept, held))
        return result

    def _kept(self, argument: Any) -> Any:
        """The argument of an op, with aliases in place of tensors."""
        if isinstance(argument, Tensor):
            return self._hold(argument, self._foreign)
        return list(map(self._kept, argument)) if isinstance(argument, list | tuple) else argument

    def replay(self) -> None:
        for tensor in self._foreign.values():
            assert self._is_used(tensor), f"a graph uses a tensor {tuple(tensor.shape)} that has been freed"
        with torch.no_grad():
            for tensor in self._reusable:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            for func, args, kwargs, new in self._calls:
                result = func(*args, **kwargs)
                results = leaves((result,)) if new else ()
                for tensor, place in new:
                    tensor.copy_(results[place])
