"""CUDA streams and asynchronous copies between device and host memory, with versions for the CPU and for meta tensors.

On a CPU every operation completes before its call returns, so streams are no-ops and events are None.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Event = torch.cuda.Event | None
"""CUDA event; None stands for work that has already completed."""


_NO_CHANGE = nullcontext()
"""Keeps the current stream."""


class Streams:
    """Named CUDA streams of one device. This base class, for CPU and meta tensors, has no streams: `run` calls `work`
    directly, and the other methods do nothing."""

    def on(self, name: str) -> AbstractContextManager[object]:
        """Makes the stream `name` current in a with block. "compute" is the stream that was current at construction."""
        return _NO_CHANGE

    def fork(self, name: str) -> AbstractContextManager[object]:
        """Makes stream `name` current, as `on` does, and makes it wait for the work queued on the previous stream."""
        return _NO_CHANGE

    def run(self, name: str, after: Event, work: Callable[[], object]) -> Event:
        """Calls `work` with stream `name` current, which first waits for the event `after`; returns the event of its
        completion."""
        work()
        return None

    def record(self) -> Event:
        """Records an event on the current stream."""
        return None

    def wait(self, event: Event) -> None:
        """Makes the current stream wait for an event, without blocking the host."""

    def record_use(self, tensor: Tensor) -> None:
        """Defers reuse of the tensor's memory until the current stream has finished the work queued so far."""

    def none_while_capturing(self) -> "Streams":
        """Returns these streams or, while a CUDA graph captures the current stream, streams whose methods do
        nothing."""
        return self


class _Current:
    """Context manager that makes a CUDA stream current. `torch.cuda.stream` also switches devices and takes several
    times as long on the host."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._previous = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._previous)


class CudaStreams(Streams):
    """Streams of a GPU: the current stream as "compute", and one new stream per name in `names`."""

    def __init__(self, device: torch.device, names: tuple[str, ...], *, high_priority: bool = False) -> None:
        """`high_priority`: gives the new streams high CUDA stream priority."""
        self._streams = {name: torch.cuda.Stream(device, priority=-1 if high_priority else 0) for name in names}
        self._streams["compute"] = torch.cuda.current_stream(device)
        self._device = self._streams["compute"].device_index

    def on(self, name: str) -> AbstractContextManager[object]:
        return _Current(self._streams[name])

    def fork(self, name: str) -> AbstractContextManager[object]:
        self._streams[name].wait_stream(self._current())
        return self.on(name)

    def run(self, name: str, after: Event, work: Callable[[], object]) -> Event:
        with self.on(name):
            self.wait(after)
            work()
            return self.record()

    def record(self) -> Event:
        return self._current().record_event()

    def wait(self, event: Event) -> None:
        if event is not None:
            self._current().wait_event(event)

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._current())

    def none_while_capturing(self) -> Streams:
        return Streams() if torch.cuda.is_current_stream_capturing() else self

    def _current(self) -> torch.cuda.Stream:
        # with the device's index, because torch takes several times as long to look up the current device
        return torch.cuda.current_stream(self._device)


def make_streams(device: torch.device, *names: str, high_priority: bool = False) -> Streams:
    """Creates the streams of a device: "compute" and one per name in `names`; see `CudaStreams`."""
    return CudaStreams(device, names, high_priority=high_priority) if device.type == "cuda" else Streams()


class HostCopies(Streams):
    """Copies between a device and host memory; this base class copies synchronously, from CPU to CPU.

    Source and destination are flat tensors of equal size and dtype.
    """

    has_data = True
    """False if host buffers are meta tensors, which hold no data."""

    def host_buffer(self, size: int, dtype: torch.dtype, *, pinned: bool = True, exact: bool = True) -> Tensor:
        """Allocates a tensor of `size` elements in host memory, filled with zeros if `exact`.

        Args:
            pinned: allocates page-locked memory, so that copies are asynchronous.
            exact: allocates exactly `size` elements; if False, pinned memory comes from torch's caching host allocator,
                which is faster but rounds sizes up to a power of two.
        """
        return torch.zeros(size, dtype=dtype, device="cpu" if self.has_data else "meta")

    def to_host(self, into: Tensor, source: Tensor, *after: Event, free_source: bool = False) -> Event:
        """Copies `source`, on the device, to `into`, on the host. Returns an event that completes with the copy.

        The copy waits for the work queued on the current stream and for the events `after`. `free_source`: allows the
        caller to free `source` immediately; its memory is not reused before the end of the copy.
        """
        into.copy_(source)
        return None

    def to_device(self, into: Tensor, source: Tensor, *after: Event) -> Event:
        """Copies `source`, on the host, to `into`, on the device. Returns an event that completes with the copy.

        The copy waits for the events `after`, but not for the current stream. `source` must not change and `into` must
        not be freed until the copy has completed.
        """
        into.copy_(source)
        return None

    def synchronize(self, event: Event) -> None:
        """Blocks the host until an event has completed."""

    def synchronize_all(self) -> None:
        """Blocks the host until all copies have completed."""


class CudaHostCopies(HostCopies, CudaStreams):
    """Asynchronous copies between a GPU and host memory, on one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, ("to_host", "to_device"))
        self._registered: list[Tensor] = []
        weakref.finalize(self, _unregister, self._registered)

    def host_buffer(self, size: int, dtype: torch.dtype, *, pinned: bool = True, exact: bool = True) -> Tensor:
        if pinned and not exact:
            return torch.empty(size, dtype=dtype, pin_memory=True)
        memory = torch.zeros(size, dtype=dtype)
        if pinned and size:
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
            if int(status) == 0:
                self._registered.append(memory)
        return memory

    def to_host(self, into: Tensor, source: Tensor, *after: Event, free_source: bool = False) -> Event:
        with self.fork("to_host"):
            return self._copy(into, source, after, source if free_source else None)

    def to_device(self, into: Tensor, source: Tensor, *after: Event) -> Event:
        with self.on("to_device"):
            return self._copy(into, source, after, None)

    def synchronize(self, event: Event) -> None:
        if event is not None:
            event.synchronize()

    def synchronize_all(self) -> None:
        for name in ("to_host", "to_device"):
            self._streams[name].synchronize()

    def _copy(self, into: Tensor, source: Tensor, after: tuple[Event, ...], freed: Tensor | None) -> Event:
        for event in after:
            self.wait(event)
        into.copy_(source, non_blocking=True)
        if freed is not None:
            self.record_use(freed)
        return self.record()


def _unregister(memory: list[Tensor]) -> None:
    for each in memory:
        torch.cuda.cudart().cudaHostUnregister(each.data_ptr())  # type: ignore[no-untyped-call]
    memory.clear()


class MetaHostCopies(HostCopies):
    """`HostCopies` for meta tensors: host buffers are meta tensors, and no data is copied."""

    has_data = False


def make_host_copies(device: torch.device) -> HostCopies:
    """Creates the `HostCopies` for a device: CUDA, CPU or meta."""
    if device.type == "meta":
        return MetaHostCopies()
    return CudaHostCopies(device) if device.type == "cuda" else HostCopies()
