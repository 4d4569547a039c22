"""Copies between a device and host memory, beside the device's work.

On a GPU there is a stream for each direction, and whoever needs what a copy brings waits for its mark: the device
without the host, or the host. On a CPU a copy is done when it is asked for, and all of this is nothing.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

Mark = Any
"""A point in the work of a device or of a copy stream."""


class Transfers:
    """Copies of a CPU to itself."""

    def room(self, size: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """[size] zeros in host memory. `pinned`: the device reaches it without the host's help."""
        return torch.zeros(size, dtype=dtype)

    def mark(self) -> Mark:
        """The end of what the device was given so far."""
        return None

    def down(self, into: Tensor, source: Tensor) -> Mark:
        """To the host, after what the device was given so far."""
        into.copy_(source)
        return None

    def up(self, into: Tensor, source: Tensor, after: Mark) -> Mark:
        """To the device, after a mark; nobody writes the source until the copy is over."""
        into.copy_(source)
        return None

    def device_waits(self, mark: Mark) -> None:
        """What the device is given from now on comes after the mark."""

    def host_waits(self, mark: Mark) -> None:
        """The host goes on when the mark is reached."""

    def settle(self) -> None:
        """The host goes on when all copies are over."""


class CudaTransfers(Transfers):
    """Copies of a GPU, on two streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked)

    def room(self, size: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        memory = torch.zeros(size, dtype=dtype)
        if pinned and size:  # torch's own pinned memory would be rounded up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
            if int(status) == 0:
                self._locked.append(memory)
        return memory

    def mark(self) -> Mark:
        return torch.cuda.current_stream().record_event()

    def down(self, into: Tensor, source: Tensor) -> Mark:
        self._down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._down):
            into.copy_(source, non_blocking=True)
        return self._down.record_event()

    def up(self, into: Tensor, source: Tensor, after: Mark) -> Mark:
        self._up.wait_event(after)
        with torch.cuda.stream(self._up):
            into.copy_(source, non_blocking=True)
        return self._up.record_event()

    def device_waits(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def host_waits(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def settle(self) -> None:
        self._down.synchronize()
        self._up.synchronize()


def _unlock(memory: list[Tensor]) -> None:
    for each in memory:
        torch.cuda.cudart().cudaHostUnregister(each.data_ptr())  # type: ignore[no-untyped-call]
    memory.clear()


class NoTransfers(Transfers):
    """Of tensors without data: room in host memory has none either."""

    def room(self, size: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        return torch.zeros(size, dtype=dtype, device="meta")


def transfers_of(device: torch.device) -> Transfers:
    """The copies of a device, to be made once per run."""
    if device.type == "meta":
        return NoTransfers()
    return CudaTransfers(device) if device.type == "cuda" else Transfers()
