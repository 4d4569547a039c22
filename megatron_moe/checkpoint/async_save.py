"""Background threads and the host buffer of asynchronous saves."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard

_ALIGN_BYTES = 64

Result = TypeVar("Result")


def submit(call: Callable[[], Result], *, in_thread: bool) -> Future[Result]:
    """Runs `call` in a daemon thread if `in_thread`, else immediately. The future holds its result or exception."""
    future: Future[Result] = Future()

    def complete_future() -> None:
        with _ExceptionTo(future):
            future.set_result(call())

    if in_thread:
        threading.Thread(target=complete_future, name="checkpoint", daemon=True).start()
    else:
        complete_future()
    return future


def run_parallel(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs each call in its own thread, or a single call in this thread, and returns their results in order.

    Waits for all calls even if one fails, so that no thread still uses the caller's tensors on return. Then raises the
    exception of the first failed call.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    futures = [submit(_with_torch_state(call), in_thread=True) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def _with_torch_state(call: Callable[[], Result]) -> Callable[[], Result]:
    """Wraps `call` to run with this thread's CUDA device and gradient mode, which new threads do not inherit."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    grad_enabled = torch.is_grad_enabled()

    def call_with_state() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(grad_enabled):
            return call()

    return call_with_state


@dataclass(frozen=True)
class _ExceptionTo:
    """Context manager that stores an exception raised in its body in a future instead of propagating it."""

    future: Future[Any]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True


class HostBuffer:
    """Host memory for a copy of this rank's tensors, page-locked if possible if they are on a GPU.

    `copy` allocates the memory on the first call and whenever it is too small. Each call overwrites the previous copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, tensors: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """Copies the tensors to this buffer and returns the copies. The originals may be modified after the return."""
        sources = [box.values() for tensor in tensors.values() for box in tensor.boxes]
        self._reserve(sum(map(_aligned_bytes, sources)), pinned=any(source.is_cuda for source in sources))
        copies = iter(self._copy_all(sources))
        copied = {
            key: TensorShard(tensor.shape, tuple(TensorBox(box.offset, next(copies)) for box in tensor.boxes))
            for key, tensor in tensors.items()
        }
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return copied

    def release(self) -> None:
        """Frees the memory of the buffer."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if self._memory.numel() >= num_bytes:
            return
        self.release()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if pinned:  # torch's pinned allocator would round up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
            self._pinned = int(status) == 0

    def _copy_all(self, sources: list[Tensor]) -> Iterator[Tensor]:
        start = 0
        for source in sources:
            num_bytes = source.numel() * source.element_size()
            copy = self._memory[start : start + num_bytes].view(source.dtype).view(source.shape)
            # A copy into pageable memory is synchronous in torch despite non_blocking.
            yield copy.copy_(source.detach(), non_blocking=True)
            start += _aligned_bytes(source)


def _aligned_bytes(tensor: Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
