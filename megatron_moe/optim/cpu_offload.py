"""Optimizer state in host memory: stepped on the CPU, or copied to the device for the step.

Numbers equal those of resident state. State that the CPU steps never is on the device: gradients are copied to the host
and new weights to the device. Parked state is copied to the device chunk by chunk, updated there under the step's
device flags, and copied back, without a host synchronisation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.optim.state import OptimizerState, StoredState
from megatron_moe.optim.update_rule import StepScalars, UpdateRule
from megatron_moe.parallel.streams import Event, HostCopies

_HOST_CHUNK = 1 << 20
"""Elements that are copied and stepped at a time: few enough for the host's caches."""


class CPUStep:
    """Steps states on the CPU.

    The host blocks until gradients, clip factor and the flag `proceed` have been copied, and returns if the step is
    rejected. The device's compute stream waits only for the new weights. With `overlap` the gradients of the next chunk
    and the weights of the last one are copied while the CPU steps a chunk.
    """

    def __init__(
        self,
        states: Sequence[OptimizerState],
        rule: UpdateRule,
        config: OptimizerOffloadConfig,
        kernels: Kernels,
        copies: HostCopies,
    ) -> None:
        """`kernels`: those of the device; they also step host states if the device is a CPU."""
        self._states = tuple(states)
        self._rule = rule
        self._config = config
        self._copies = copies
        self._kernels = _host_kernels(config, kernels, self._states) if states else kernels
        self._grads: list[Tensor] = []
        self._weights: list[Tensor] = []
        if states:
            size = min(_HOST_CHUNK, max(state.size for state in states))
            grads = max((state.grads.dtype for state in states), key=_width)
            weights = max((state.weights.dtype for state in states), key=_width)
            self._grads = [copies.host_buffer(size, grads, pinned=config.pin_cpu_grads) for _ in range(2)]
            self._weights = [copies.host_buffer(size, weights, pinned=config.pin_cpu_params) for _ in range(2)]
            self._scalars = copies.host_buffer(4, torch.float64)

    def run(self, scalars: StepScalars) -> None:
        """Steps all states. The compute stream waits for the copies of the new weights."""
        if not self._states or not self._copies.has_data:
            return
        chunks = list(self._chunks())
        begin = self._copies.record()
        here = self._on_host(scalars)
        if not here.proceed:
            return
        ahead = self._config.overlap_cpu_optimizer_d2h_h2d
        coming = [self._bring(0, chunks)]
        going: list[Event] = []
        for number, (state, start, end) in enumerate(chunks):
            if ahead:
                coming.append(self._bring(number + 1, chunks))
            self._copies.synchronize(coming[number])
            if number >= 2:
                self._copies.synchronize(going[number - 2])  # the room is read until then
            self._step(here, state, start, end, number % 2)
            device = state.weights[start:end]
            room = _view(self._weights[number % 2], device)
            going.append(self._copies.to_device(device, room, begin))
            if not ahead:
                self._copies.synchronize(going[-1])
                coming.append(self._bring(number + 1, chunks))
        self._copies.wait(going[-1])
        if here.nonfinite:
            scalars.nonfinite.fill_(True)

    def _chunks(self) -> Iterator[tuple[OptimizerState, int, int]]:
        for state in self._states:
            for start, end in state.chunks(_HOST_CHUNK):
                yield state, start, end

    def _on_host(self, scalars: StepScalars) -> StepScalars:
        """Copies the step's scalars and blocks the host until they have arrived. The clip factor keeps its dtype."""
        on_device = (scalars.step, scalars.grad_scale, scalars.proceed, scalars.nonfinite)
        stacked = torch.stack([each.double() for each in on_device])
        self._copies.synchronize(self._copies.to_host(self._scalars, stacked))
        step, scale, proceed, nonfinite = self._scalars.unbind()
        return replace(
            scalars,
            step=step.to(torch.int64),
            grad_scale=scale.to(scalars.grad_scale.dtype),
            proceed=proceed.to(torch.bool),
            nonfinite=nonfinite.to(torch.bool),
        )

    def _bring(self, number: int, chunks: Sequence[tuple[OptimizerState, int, int]]) -> Event:
        """Starts the copy of a chunk's gradients to the host."""
        if number >= len(chunks):
            return None
        state, start, end = chunks[number]
        grads = state.grads[start:end]
        return self._copies.to_host(_view(self._grads[number % 2], grads), grads)

    def _step(self, scalars: StepScalars, state: OptimizerState, start: int, end: int, slot: int) -> None:
        weights = _view(self._weights[slot], state.weights[start:end])
        grads = _view(self._grads[slot], state.grads[start:end])
        operands = state.operands(start, end)._replace(weights=weights, grads=grads)
        self._rule.step(scalars, operands, self._kernels)


class StreamedStep:
    """Steps parked states on the device in a three-stage pipeline over chunks: copy to the device, step, copy back."""

    def __init__(
        self,
        states: Sequence[OptimizerState],
        rule: UpdateRule,
        config: OptimizerOffloadConfig,
        kernels: Kernels,
        copies: HostCopies,
    ) -> None:
        self._states = tuple(states)
        self._rule = rule
        self._config = config
        self._kernels = kernels
        self._copies = copies

    def run(self, scalars: StepScalars) -> None:
        """Launches all copies and updates. The compute stream waits for the last copy back."""
        chunks = list(self._chunks())
        rooms: dict[int, tuple[StoredState, Event]] = {}
        gone: list[Event] = []
        for number in range(len(chunks) + 1):
            if number >= 2:
                self._copies.wait(gone[number - 2])
                del rooms[number - 2]  # its memory is free
            if number < len(chunks):
                rooms[number] = self._bring(*chunks[number])
            if number > 0:
                gone.append(self._step(scalars, *chunks[number - 1], *rooms[number - 1]))
        if gone:
            self._copies.wait(gone[-1])

    def _chunks(self) -> Iterator[tuple[OptimizerState, int, int]]:
        for state in self._states:
            size = state.size
            if self._config.chunk_bytes:
                size = self._config.chunk_bytes * state.size // sum(each.num_bytes for each in state.kept.all)
            for start, end in state.chunks(size):
                yield state, start, end

    def _bring(self, state: OptimizerState, start: int, end: int) -> tuple[StoredState, Event]:
        home = state.kept.part(start, end)
        room = home.like(state.weights.device)
        after = self._copies.record()
        mark = None
        for into, source in zip(room.tensors, home.tensors, strict=True):
            mark = self._copies.to_device(into, source, after)
        return room, mark

    def _step(
        self, scalars: StepScalars, state: OptimizerState, start: int, end: int, room: StoredState, here: Event
    ) -> Event:
        self._copies.wait(here)
        self._rule.step(scalars, state.operands(start, end)._replace(stored=room), self._kernels)
        mark = None
        for into, source in zip(state.kept.part(start, end).tensors, room.tensors, strict=True):
            mark = self._copies.to_host(into, source)
        return mark


def _host_kernels(config: OptimizerOffloadConfig, kernels: Kernels, states: Sequence[OptimizerState]) -> Kernels:
    device = states[0].weights.device
    if device.type == "cpu" and not config.use_torch_optimizer_for_cpu_offload:
        return kernels
    name = "torch_native" if config.use_torch_optimizer_for_cpu_offload else "reference"
    wishes = (("adamw_", name), ("adamw_packed_", name))
    return select_kernels(
        KernelConfig(kernel_backend="reference", kernel_per_op=wishes), torch.device("cpu"), states[0].grads.dtype
    )


def _view(room: Tensor, like: Tensor) -> Tensor:
    """The start of a host buffer with the size and dtype of another tensor."""
    return room.view(torch.uint8)[: like.nbytes].view(like.dtype)


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize
