"""Overlap of the optimizer step with the next forward, bucket by bucket on a side stream.

The update is bound by memory bandwidth, the forward mostly by compute. Buckets are stepped in the order in which the
forward reads the weights, and each node of the forward acquires its own unit (`ParamStore.acquire`). Numbers equal
those of an update in one go. A backward writes gradients only of parameters whose forward has waited for the update
that reads them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.state import OptimizerState, UpdateOperands
from megatron_moe.optim.update_rule import StepScalars, UpdateRule

Mark = Any
"""A point in the work of the side stream."""


class SideStream:
    """The side of a CPU: work is done when it is launched, and all of this is nothing."""

    def begin(self) -> AbstractContextManager[object]:
        """What the body launches goes beside what the device is given afterwards, and comes after what it has."""
        return nullcontext()

    def mark(self) -> Mark:
        """The end of what the current stream was given so far."""
        return None

    def wait(self, mark: Mark) -> None:
        """What the current stream is given from now on comes after the mark."""


class CudaSideStream(SideStream):
    """The side of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return torch.cuda.current_stream().record_event()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(mark)


def side_stream_of(device: torch.device) -> SideStream:
    """The side of a device, to be made once per run."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()


class OverlappedOptimizerStep:
    """Steps all buckets on the side stream.

    Args:
        buckets: this rank's ranges of every bucket, in forward order.
        write_back: `ParamStore.write_back`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[UpdateOperands]],
        rule: UpdateRule,
        kernels: Kernels,
        side: SideStream,
        write_back: Callable[[int, SideStream], None],
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._rule = rule
        self._kernels = kernels
        self._side = side
        self._write_back = write_back
        self._scalars: StepScalars | None = None
        """Kept alive while the side stream may read them."""

    def start(self, scalars: StepScalars) -> None:
        """Launches the update of all buckets. Those of the last update have been acquired."""
        self._scalars = scalars
        with self._side.begin():
            for number, bucket in enumerate(self._buckets):
                for operands in bucket:
                    self._rule.step(scalars, operands, self._kernels)
                self._write_back(number, self._side)


def operands_of(states: Iterable[OptimizerState], start: int, end: int) -> list[UpdateOperands]:
    """The parts of states of one buffer inside its elements `start` to `end`."""
    inside = [(state, max(start, state.start), min(end, state.end)) for state in states]
    return [state.operands(first - state.start, last - state.start) for state, first, last in inside if first < last]
