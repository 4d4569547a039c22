"""Two queues of work on one device, computation and communication, so that either goes on while the other waits.

On a GPU the communication lane is a stream beside the current one. Work that needs what another lane makes waits for a
mark. Memory that crosses from one lane to another is kept until both are done with it. On a CPU work is done in the
order in which it is launched, and all of this is nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_moe.pipeline.overlap import Stream

Mark = Any
"""A point in the work of a lane."""


class Lanes:
    """The lanes of a CPU."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """What the body launches goes to this lane."""
        return nullcontext()

    def mark(self) -> Mark:
        """The end of what the current lane was given so far."""
        return None

    def wait(self, mark: Mark) -> None:
        """What the current lane is given from now on comes after the mark."""

    def keep(self, tensor: Tensor) -> None:
        """The current lane uses a tensor that may come from another one."""


class CudaLanes(Lanes):
    """The lanes of a GPU. Computation is the stream that is current when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._streams = {
            "compute": torch.cuda.current_stream(device),
            "communication": torch.cuda.Stream(device),
        }

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[stream])

    def mark(self) -> Mark:
        return torch.cuda.current_stream().record_event()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream())


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device, to be made once per run."""
    return CudaLanes(device) if device.type == "cuda" else Lanes()
