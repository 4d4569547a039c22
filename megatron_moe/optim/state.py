"""Optimizer state of the ranges that a rank owns (formats, memory), and the interface of update rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.precision import PrecisionConfig, StateName
from megatron_moe.kernels.low_precision_state import BLOCK, Format, PackedState, pack, round_weights, unpack
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.grad_buffers import FlatBuffer
from megatron_moe.optim.param_layout import BufferKey, OwnerAlignment, Range
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.parallel.streams import HostCopies

Home = Literal["device", "host", "streamed"]
"""device: device memory; host: host memory, stepped on the CPU; streamed: host memory, stepped on the device."""
_CHUNK = 1 << 22
"""Elements that are converted at a time, outside of steps."""


class MomentSpec(NamedTuple):
    """One kind of state that an update rule keeps in addition to the master weights."""

    kind: str
    """Name in checkpoints."""
    format: StateName
    root: bool = False
    """Narrow formats store the square root."""


class StoredState(NamedTuple):
    """Master weights and moments of consecutive elements."""

    master: PackedState | None
    """None: the parameters themselves are the masters."""
    moments: Mapping[str, PackedState]
    """Moments by kind, in the order in which the update rule declares them."""

    @property
    def all(self) -> tuple[PackedState, ...]:
        return (*(() if self.master is None else (self.master,)), *self.moments.values())

    @property
    def tensors(self) -> list[Tensor]:
        return [part for each in self.all for part in each.parts]

    def part(self, start: int, end: int) -> "StoredState":
        """Views of elements `start` to `end`; `start` begins a block."""
        moments = {kind: moment.part(start, end) for kind, moment in self.moments.items()}
        return StoredState(None if self.master is None else self.master.part(start, end), moments)

    def like(self, device: torch.device) -> "StoredState":
        """Uninitialised memory for the same state on another device."""
        moments = {kind: moment.like(device) for kind, moment in self.moments.items()}
        return StoredState(None if self.master is None else self.master.like(device), moments)


class UpdateOperands(NamedTuple):
    """Consecutive elements of a flat buffer with all tensors that an update reads and writes."""

    key: BufferKey
    start: int
    """First element in the buffer."""
    weights: Tensor
    grads: Tensor
    stored: StoredState


@dataclass(frozen=True)
class StepScalars:
    """Hyperparameters and flags of one step. Tensors are scalars on the device of the state."""

    lr: float
    decoupled_lr: float | None
    weight_decay: float
    step: Tensor
    """Number of the update, int64."""
    grad_scale: Tensor
    proceed: Tensor
    nonfinite: Tensor
    """See `AdamWStep`."""


class UpdateRule(Protocol):
    """An optimizer: the state it keeps per element, and the update of a range."""

    @property
    def moments(self) -> tuple[MomentSpec, ...]:
        """Kinds of state in addition to the master weights."""
        ...

    @property
    def alignment(self) -> OwnerAlignment:
        """Smallest part of a matrix that `step` can update alone."""
        ...

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights and state in place. `kernels` run where the operands are."""
        ...


@dataclass(frozen=True)
class OptimizerState:
    """State of a range of a flat buffer that this rank owns."""

    buffer: FlatBuffer
    start: int
    """First element in the buffer."""
    weights: Tensor
    """View of the buffer."""
    grads: Tensor
    """View of the buffer."""
    kept: StoredState
    home: Home
    saves_master: bool
    """Masters are of another dtype than the parameters, so that a checkpoint needs them."""

    @property
    def size(self) -> int:
        return self.weights.numel()

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def kinds(self) -> dict[str, PackedState]:
        """State that a checkpoint holds, by kind; "master" are the master weights."""
        moments = dict(self.kept.moments)
        return {"master": self.kept.master, **moments} if self.saves_master and self.kept.master else moments

    def operands(self, start: int = 0, end: int | None = None) -> UpdateOperands:
        """Views of elements `start` to `end` of this state; `start` begins a block."""
        end = self.size if end is None else end
        stored = self.kept.part(start, end)
        return UpdateOperands(
            self.buffer.key, self.start + start, self.weights[start:end], self.grads[start:end], stored
        )

    def chunks(self, size: int = _CHUNK) -> Iterator[Range]:
        """(start, end) of consecutive parts of whole blocks."""
        size = max(size // BLOCK * BLOCK, BLOCK)
        for start in range(0, self.size, size):
            yield start, min(start + size, self.size)

    def read(self, kind: str) -> Tensor:
        """Copies the values to host memory in fp32 (fp64 in fp64 runs)."""
        state = self.kinds[kind]
        wide = torch.float64 if state.data.dtype == torch.float64 else torch.float32
        out = torch.empty(self.size, dtype=wide)
        for start, end in self.chunks():
            out[start:end] = self._numbers(state, start, end)
        return out

    def _numbers(self, state: PackedState, start: int, end: int) -> Tensor:
        """Unpacked values on the device of the state."""
        part = state.part(start, end)
        needs_weights = part.format == "remainder"
        return unpack(part, self.weights[start:end].to(part.data.device) if needs_weights else None)

    def write(self, kind: str, numbers: Tensor) -> None:
        """Stores values as returned by `read`. For remainders the weights are set too."""
        state = self.kinds[kind]
        for start, end in self.chunks():
            part, weights = state.part(start, end), self.weights[start:end]
            new = numbers[start:end].to(state.data.device)
            rounded = round_weights(new, weights.dtype)
            if part.format == "remainder":
                weights.copy_(rounded)
            _copy(part, pack(new, part, rounded))

    def weights_from_master(self) -> None:
        """Rounds master weights to parameters; masters that are not in checkpoints are set from the weights."""
        master = self.kept.master
        if master is None or master.format == "remainder":
            return
        if not self.saves_master:
            self.master_from_weights()
            return
        for start, end in self.chunks():
            numbers = self._numbers(master, start, end).to(self.weights.device)
            self.weights[start:end] = round_weights(numbers, self.weights.dtype)

    def master_from_weights(self) -> None:
        """Sets the master weights from the parameters."""
        master = self.kept.master
        if master is None:
            return
        for start, end in self.chunks():
            part, weights = master.part(start, end), self.weights[start:end].to(master.data.device)
            wide = weights.to(torch.float64 if part.data.dtype == torch.float64 else torch.float32)
            _copy(part, pack(wide, part, weights))

    def sum_of_squares(self, kernels: Kernels) -> Tensor:
        """Sum of squares of the master weights, a scalar on the device."""
        master = self.kept.master
        if master is None:
            return kernels.sum_of_squares(self.weights)
        if master.format == "plain" and self.home == "device":
            return kernels.sum_of_squares(master.data)
        device = self.weights.device
        parts = (self._numbers(master, start, end).to(device) for start, end in self.chunks())
        return torch.stack([kernels.sum_of_squares(part) for part in parts]).sum()


def _copy(into: PackedState, source: PackedState) -> None:
    for old, new in zip(into.parts, source.parts, strict=True):
        old.copy_(new)


def new_states(
    buffer: FlatBuffer,
    moments: Sequence[MomentSpec],
    precision: PrecisionConfig,
    config: OptimizerOffloadConfig,
    copies: HostCopies,
) -> Iterator[OptimizerState]:
    """State of all ranges of a buffer that this rank owns: masters equal the weights, moments are zero.

    The configured fraction of the elements, the first ones in whole blocks, is in host memory.
    """
    on_host = int(config.fraction * sum(end - start for start, end in buffer.owned))
    for start, end in buffer.owned:
        middle = min(start + -(-on_host // BLOCK) * BLOCK, end) if on_host > 0 else start
        if start < middle:
            home: Home = "host" if config.cpu_step else "streamed"
            yield _new_state(buffer, (start, middle), moments, precision, home, copies)
        if middle < end:
            yield _new_state(buffer, (middle, end), moments, precision, "device", copies)
        on_host -= middle - start


def _new_state(
    buffer: FlatBuffer,
    owned: Range,
    moments: Sequence[MomentSpec],
    precision: PrecisionConfig,
    home: Home,
    copies: HostCopies,
) -> OptimizerState:
    start, end = owned
    weights, grads = buffer.weights[start:end], buffer.grads[start:end]
    fp64 = precision.main_params_dtype == "fp64"
    saves_master = weights.dtype != torch_dtype(precision.main_params_dtype)

    def zeros(name: Format, plain: torch.dtype, *, root: bool = False) -> PackedState:
        device = weights.device if home == "device" else torch.device("meta")
        state = PackedState.zeros(end - start, name, torch.float64 if fp64 else plain, device, root=root)
        if home == "device":
            return state
        parts = [copies.host_buffer(part.numel(), part.dtype, pinned=home == "streamed") for part in state.parts]
        return PackedState(name, parts[0], parts[1] if len(parts) > 1 else None, state.root)

    def moment(spec: MomentSpec) -> PackedState:
        if spec.format in ("fp16", "fp8") and not fp64:
            return zeros(spec.format, torch.float32, root=spec.root)
        return zeros("plain", torch.bfloat16 if spec.format == "bf16" else torch.float32)

    master = None
    if saves_master or home == "host":
        remainders = precision.store_param_remainders and weights.dtype is torch.bfloat16 and home != "host"
        name: Format = "remainder" if remainders else "fp16" if precision.main_params_dtype == "fp16" else "plain"
        master = zeros(name, torch.float32)
    kept = StoredState(master, {spec.kind: moment(spec) for spec in moments})
    state = OptimizerState(buffer, start, weights, grads, kept, home, saves_master)
    state.master_from_weights()
    return state
