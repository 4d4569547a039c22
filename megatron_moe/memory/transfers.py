"""Copies between device and host beside the computation, and the host memory they go to.

On a GPU either direction has a stream of its own and host memory is pinned. On a CPU a copy is made when it is asked
for, and nothing waits.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

Mark = Any
"""The end of a copy."""


class Transfers:
    """The copies of a CPU, and what every kind has: host buffers that are used again."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Mark]]] = defaultdict(list)
        self.num_buffers = 0
        """Host buffers that were ever made."""
        self.bytes_sent = 0
        self.bytes_fetched = 0

    def send(self, flat: Tensor) -> tuple[Tensor, Mark]:
        """Starts a copy of a flat tensor to the host: (where it goes, mark). The tensor may be let go of at once."""
        free = self._free[flat.numel(), flat.dtype]
        buffer, mark = free.pop() if free else (self._new_buffer(flat), None)
        self.bytes_sent += flat.nbytes
        return buffer, self._out(flat, buffer, mark)

    def fetch(self, buffer: Tensor, sent: Mark, device: torch.device) -> tuple[Tensor, Mark]:
        """Starts a copy back, after the one that is marked: (the flat tensor, mark)."""
        self.bytes_fetched += buffer.nbytes
        return self._back(buffer, sent, device)

    def give_back(self, buffer: Tensor, read: Mark) -> None:
        """The buffer may be written again when what is marked is done."""
        self._free[buffer.numel(), buffer.dtype].append((buffer, read))

    def wait(self, mark: Mark) -> None:
        """What the computation is given from now on comes after the mark."""

    def _new_buffer(self, flat: Tensor) -> Tensor:
        self.num_buffers += 1
        return self._host_memory(flat)

    def _host_memory(self, flat: Tensor) -> Tensor:
        return torch.empty_like(flat)

    def _out(self, flat: Tensor, buffer: Tensor, free: Mark) -> Mark:
        buffer.copy_(flat)
        return None

    def _back(self, buffer: Tensor, sent: Mark, device: torch.device) -> tuple[Tensor, Mark]:
        return buffer.clone(), None


class CudaTransfers(Transfers):
    """The copies of a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def _host_memory(self, flat: Tensor) -> Tensor:
        return torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)

    def _out(self, flat: Tensor, buffer: Tensor, free: Mark) -> Mark:
        stream = self._to_host
        stream.wait_stream(torch.cuda.current_stream())
        if free is not None:
            stream.wait_event(free)
        with torch.cuda.stream(stream):
            buffer.copy_(flat, non_blocking=True)
        # its memory is not used for something else before the copy is made
        flat.record_stream(stream)
        return stream.record_event()

    def _back(self, buffer: Tensor, sent: Mark, device: torch.device) -> tuple[Tensor, Mark]:
        stream = self._to_device
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=device)
        # memory of the computation's stream, which may have been used there until now
        stream.wait_stream(torch.cuda.current_stream())
        if sent is not None:
            stream.wait_event(sent)
        with torch.cuda.stream(stream):
            flat.copy_(buffer, non_blocking=True)
        flat.record_stream(stream)
        return flat, stream.record_event()


def transfers_of(device: torch.device) -> Transfers:
    """The copies of a device, to be made once per run."""
    return CudaTransfers(device) if device.type == "cuda" else Transfers()
