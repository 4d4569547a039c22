"""Optimizer state in host memory, either updated on the CPU or streamed to the device for the step.

Results are identical to steps with state in device memory. State that is updated on the CPU stays in host memory:
gradients are copied to the host and new weights to the device, except weights stored in FP8 or FP4, which
`StoredWeights` quantises from the master weights. Streamed state is copied to the device chunk by chunk, updated there,
and copied back. Streaming needs no host synchronisation: rejected steps are skipped on the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.optim.state import OptimizerState, StepScalars, StoredState
from megatron_moe.parallel.streams import Event, HostCopies

_HOST_CHUNK = 1 << 20
"""Number of elements that are copied and updated at a time, small enough for the CPU caches."""
Chunk = tuple[OptimizerState, int, int]
"""(state, start, end): range of elements of a state that is updated at a time."""


@dataclass
class _OffloadedStep:
    states: Sequence[OptimizerState]
    config: OptimizerOffloadConfig
    kernels: Kernels
    """Kernels of the training device. `CPUStep` uses them only if this device is a CPU."""
    copies: HostCopies


@dataclass
class CPUStep(_OffloadedStep):
    """Updates states on the CPU.

    The host waits for the copy of the step's scalars and, unless the step is rejected, for the gradients of each chunk.
    The device's compute stream waits only for the new weights. With `overlap_cpu_optimizer_d2h_h2d`, gradients of the
    next chunk and weights of the previous chunk are copied while a chunk is stepped.
    """

    def __post_init__(self) -> None:
        self._grads: list[Tensor] = []
        self._weights: list[Tensor] = []
        if self.states:
            self._kernels = _host_kernels(self.config, self.kernels, self.states)
            size = min(_HOST_CHUNK, max(state.size for state in self.states))
            grads = max((state.grads.dtype for state in self.states), key=lambda dtype: dtype.itemsize)
            weights = max((state.weights.dtype for state in self.states), key=lambda dtype: dtype.itemsize)
            buffer = self.copies.host_buffer
            self._grads = [buffer(size, grads, pinned=self.config.pin_cpu_grads) for _ in range(2)]
            self._weights = [buffer(size, weights, pinned=self.config.pin_cpu_params) for _ in range(2)]
            self._scalars = buffer(4, torch.float64)

    def run(self, scalars: StepScalars) -> None:
        """Updates all states. The compute stream waits for the copies of the new weights."""
        if not self.states or not self.copies.has_data:
            return
        chunks = [(state, start, end) for state in self.states for start, end in state.chunks(_HOST_CHUNK)]
        begin = self.copies.record()
        on_host = self._copy_scalars(scalars)
        if not on_host.apply_update:
            return
        overlap = self.config.overlap_cpu_optimizer_d2h_h2d
        loaded = [self._load(0, chunks)]
        stored: list[Event] = []
        last: Event = None
        for number, (state, start, end) in enumerate(chunks):
            if overlap:
                loaded.append(self._load(number + 1, chunks))
            self.copies.synchronize(loaded[number])
            if number >= 2:
                # waits for the copy that reads the buffer, before the step overwrites it
                self.copies.synchronize(stored[number - 2])
            weights = self._step(on_host, state, start, end, number % 2)
            event = None
            if weights is not None:
                last = event = self.copies.to_device(state.weights[start:end], weights, begin)
            stored.append(event)
            if not overlap:
                self.copies.synchronize(event)
                loaded.append(self._load(number + 1, chunks))
        self.copies.wait(last)
        if on_host.nonfinite:
            scalars.nonfinite.fill_(True)

    def _copy_scalars(self, scalars: StepScalars) -> StepScalars:
        """Copies the step's scalars to the host, blocks until this is done, and returns them with unchanged dtypes."""
        on_device = (scalars.step, scalars.grad_scale, scalars.apply_update, scalars.nonfinite)
        stacked = torch.stack([each.double() for each in on_device])
        self.copies.synchronize(self.copies.to_host(self._scalars, stacked))
        step, scale, apply_update, nonfinite = self._scalars.unbind()
        return replace(
            scalars,
            step=step.to(torch.int64),
            grad_scale=scale.to(scalars.grad_scale.dtype),
            apply_update=apply_update.to(torch.bool),
            nonfinite=nonfinite.to(torch.bool),
        )

    def _load(self, number: int, chunks: Sequence[Chunk]) -> Event:
        """Starts the copy of the gradients of chunk `number` to the host; no-op past the last chunk."""
        if number >= len(chunks):
            return None
        state, start, end = chunks[number]
        grads = state.grads[start:end]
        return self.copies.to_host(_view(self._grads[number % 2], grads), grads)

    def _step(self, scalars: StepScalars, state: OptimizerState, start: int, end: int, slot: int) -> Tensor | None:
        """Updates a chunk. Returns the new weights; None if they are stored in FP8 or FP4."""
        operands = state.operands(start, end)
        weights = None if operands.weights is None else _view(self._weights[slot], operands.weights)
        grads = _view(self._grads[slot], state.grads[start:end])
        state.rule.step(scalars, operands._replace(weights=weights, grads=grads), self._kernels)
        return weights


class StreamedStep(_OffloadedStep):
    """Updates host states on the device in a three-stage pipeline over chunks: copy to the device, step, copy back."""

    def run(self, scalars: StepScalars) -> None:
        """Launches all copies and updates. The compute stream waits for the last copy back."""
        chunks = list(self._chunks())
        loaded: dict[int, tuple[StoredState, Event]] = {}
        stored: list[Event] = []
        for number in range(len(chunks) + 1):
            if number >= 2:
                self.copies.wait(stored[number - 2])
                del loaded[number - 2]  # frees the device memory of the chunk
            if number < len(chunks):
                loaded[number] = self._load(*chunks[number])
            if number > 0:
                stored.append(self._step(scalars, chunks[number - 1], *loaded[number - 1]))
        if stored:
            self.copies.wait(stored[-1])

    def _chunks(self) -> Iterator[Chunk]:
        for state in self.states:
            size = state.size
            if self.config.chunk_bytes:
                size = (
                    self.config.chunk_bytes * state.size // sum(each.num_bytes for each in state.stored.packed_states)
                )
            for start, end in state.chunks(size):
                yield state, start, end

    def _load(self, state: OptimizerState, start: int, end: int) -> tuple[StoredState, Event]:
        on_host = state.stored.part(start, end)
        on_device = on_host.new_empty(state.weights.device)
        allocated = self.copies.record()
        event = None
        for into, source in zip(on_device.tensors, on_host.tensors, strict=True):
            event = self.copies.to_device(into, source, allocated)
        return on_device, event

    def _step(self, scalars: StepScalars, chunk: Chunk, on_device: StoredState, copied: Event) -> Event:
        state, start, end = chunk
        self.copies.wait(copied)
        state.rule.step(scalars, state.operands(start, end)._replace(stored=on_device), self.kernels)
        event = None
        for into, source in zip(state.stored.part(start, end).tensors, on_device.tensors, strict=True):
            event = self.copies.to_host(into, source)
        return event


def _host_kernels(config: OptimizerOffloadConfig, kernels: Kernels, states: Sequence[OptimizerState]) -> Kernels:
    device = states[0].weights.device
    if device.type == "cpu" and not config.use_torch_optimizer_for_cpu_offload:
        return kernels
    name = "torch_native" if config.use_torch_optimizer_for_cpu_offload else "reference"
    request = KernelConfig(kernel_backend="reference", kernel_per_op=(("adamw_", name), ("adamw_packed_", name)))
    return select_kernels(request, torch.device("cpu"), states[0].grads.dtype)


def _view(buffer: Tensor, like: Tensor) -> Tensor:
    """View of the first bytes of `buffer` as a tensor with the size and dtype of `like`."""
    return buffer.view(torch.uint8)[: like.nbytes].view(like.dtype)
