"""What saving and loading need of threads: to write in the background, from a copy in host memory, and to use several
files at the same time."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_moe.checkpoint.tensor_shards import SavedTensor, TensorBox

_ALIGN_BYTES = 64

Result = TypeVar("Result")


def started(call: Callable[[], Result], *, in_thread: bool) -> Future[Result]:
    """Begins a call in a thread of its own, or makes it at once.

    The process does not wait for the thread when it ends. What the call raises, `result` raises.
    """
    future: Future[Result] = Future()

    def run() -> None:
        with _HandedTo(future):
            future.set_result(call())

    if in_thread:
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
    else:
        run()
    return future


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return; two and more are made in threads of their own. It returns or raises when all have ended,
    so that none goes on with what the caller gives up. What the first of those that fail raises, it raises."""
    if len(calls) < 2:
        return [call() for call in calls]
    futures = [started(_as_here(call), in_thread=True) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def _as_here(call: Callable[[], Result]) -> Callable[[], Result]:
    """The call with the GPU and the gradient mode of this thread, which another one does not have."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    gradients = torch.is_grad_enabled()

    def run() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(gradients):
            return call()

    return run


@dataclass(frozen=True)
class _HandedTo:
    """Whoever asks for the result gets what is raised inside."""

    future: Future[Any]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True


class HostSnapshot:
    """Host memory for a copy of what this rank saves. It is made for the first save and used again by all others; a
    copy is good until the next one is taken. For tensors on a GPU it is page-locked, so that they come at the speed of
    the bus."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def take(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """The same tensors in host memory. When it returns, the originals may change."""
        sources = [box.values() for tensor in tensors.values() for box in tensor.boxes]
        self._make_room(sum(map(_room, sources)), on_gpu=any(source.is_cuda for source in sources))
        copies = iter(self._copied(sources))
        taken = {
            key: SavedTensor(tensor.shape, tuple(TensorBox(box.offset, next(copies)) for box in tensor.boxes))
            for key, tensor in tensors.items()
        }
        if self._locked:
            torch.cuda.current_stream().synchronize()
        return taken

    def release(self) -> None:
        """Gives the memory back."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._locked = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _make_room(self, num_bytes: int, *, on_gpu: bool) -> None:
        if self._memory.numel() >= num_bytes:
            return
        self.release()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if on_gpu:  # torch's own pinned memory would be rounded up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
            self._locked = int(status) == 0

    def _copied(self, sources: list[Tensor]) -> Iterator[Tensor]:
        start = 0
        for source in sources:
            num_bytes = source.numel() * source.element_size()
            copy = self._memory[start : start + num_bytes].view(source.dtype).view(source.shape)
            # Into memory that is not page-locked torch waits for each copy by itself.
            yield copy.copy_(source.detach(), non_blocking=True)
            start += _room(source)


def _room(tensor: Tensor) -> int:
    """Bytes that a tensor takes, with what keeps the next one aligned."""
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
