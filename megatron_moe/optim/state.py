"""Optimizer state of the ranges that a rank owns, in device or host memory, and the interface of update rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.precision import PrecisionConfig, StateName
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.grad_buffers import FlatBuffer
from megatron_moe.optim.param_layout import BufferKey, OwnerAlignment, Range
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.parallel.streams import HostCopies
from megatron_moe.precision.optimizer_state import BLOCK, Format, PackedState, pack, round_weights, unpack

StatePlacement = Literal["device", "host", "streamed"]
"""Location of optimizer state. device: the state is stored and updated on the device. host: it is stored in host memory
and updated on the CPU. streamed: it is stored in host memory and updated on the device."""
_CHUNK = 1 << 22
"""Number of elements converted at a time when state is read or written outside of steps."""
_CHUNK_IN_STEP = 1 << 26
"""Number of elements converted at a time in steps, in which launches of kernels take longer than small kernels."""


class MomentSpec(NamedTuple):
    """One moment of an update rule: a value per element that the rule stores in addition to the master weight."""

    kind: str
    """Name of the moment in checkpoints."""
    format: StateName
    root: bool = False
    """True if the formats fp16 and fp8 store the square root of this moment."""


class StoredState(NamedTuple):
    """Master weights and moments of consecutive elements."""

    master: PackedState | None
    """Master weights; None: the parameters themselves are the master weights."""
    moments: Mapping[str, PackedState]
    """Moments by kind, in the order in which the update rule declares them."""

    @property
    def all(self) -> tuple[PackedState, ...]:
        return (*(() if self.master is None else (self.master,)), *self.moments.values())

    @property
    def tensors(self) -> list[Tensor]:
        return [part for each in self.all for part in each.parts]

    def part(self, start: int, end: int) -> "StoredState":
        """Views of elements `start` to `end`; `start` must be a multiple of `BLOCK` (elements that share a scale)."""
        moments = {kind: moment.part(start, end) for kind, moment in self.moments.items()}
        return StoredState(None if self.master is None else self.master.part(start, end), moments)

    def like(self, device: torch.device) -> "StoredState":
        """Allocates uninitialised state of the same formats and sizes on another device."""
        moments = {kind: moment.like(device) for kind, moment in self.moments.items()}
        return StoredState(None if self.master is None else self.master.like(device), moments)


class UpdateOperands(NamedTuple):
    """All tensors that an update of consecutive elements of a flat buffer reads and writes."""

    key: BufferKey
    start: int
    """Offset of the first element in the buffer."""
    weights: Tensor | None
    """None: only the master weights are updated, because the weights are stored in FP8 or FP4."""
    grads: Tensor
    stored: StoredState


@dataclass(frozen=True)
class StepScalars:
    """Hyperparameters and flags of one step. Tensors are scalars on the device that runs the update."""

    lr: float
    decoupled_lr: float | None
    weight_decay: float
    step: Tensor
    """int64 number of this update, starting at 1."""
    grad_scale: Tensor
    """Factor by which gradients are multiplied (gradient clipping)."""
    apply_update: Tensor
    """bool; False: weights and state stay unchanged."""
    nonfinite: Tensor
    """bool, set to True by the update if a stored weight or moment is not finite."""


class UpdateRule(Protocol):
    """Update rule of an optimizer: declares its moments and updates a range of elements."""

    @property
    def moments(self) -> tuple[MomentSpec, ...]:
        """Moments that the rule stores for every element."""
        ...

    @property
    def alignment(self) -> OwnerAlignment:
        """Smallest part of a matrix that `step` can update independently of the rest."""
        ...

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights and state in place. `kernels` must run on the device of the operands."""
        ...


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state of one range of a flat buffer. This rank owns the range."""

    buffer: FlatBuffer
    start: int
    """Offset of the range in the buffer, in elements."""
    end: int
    grads: Tensor
    """View of the buffer's gradients in the range."""
    kept: StoredState
    placement: StatePlacement
    copies: HostCopies
    """Copies between the device and host memory."""
    saves_master: bool
    """True if master weights have another dtype than the parameters, so that checkpoints must contain them."""

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def weights(self) -> Tensor:
        """View of the buffer's weights in the range."""
        return self.buffer.weights[self.start : self.end]

    @property
    def kinds(self) -> dict[str, PackedState]:
        """State that checkpoints contain, by kind: "master" for master weights, else the name of the moment."""
        moments = dict(self.kept.moments)
        return {"master": self.kept.master, **moments} if self.saves_master and self.kept.master else moments

    def operands(self, start: int = 0, end: int | None = None) -> UpdateOperands:
        """Views of elements `start` (a multiple of `BLOCK`) to `end`, counted from the start of this state."""
        end = self.size if end is None else end
        stored = self.kept.part(start, end)
        weights = None if self.buffer.codes else self.weights[start:end]
        return UpdateOperands(self.buffer.key, self.start + start, weights, self.grads[start:end], stored)

    def chunks(self, size: int = _CHUNK) -> Iterator[Range]:
        """Yields (start, end) of chunks of at most `size` elements. Offsets count from the start of this state."""
        size = max(size // BLOCK * BLOCK, BLOCK)
        for start in range(0, self.size, size):
            yield start, min(start + size, self.size)

    def read(self, kind: str) -> Tensor:
        """Returns the values of one kind of state: a copy in host memory, in fp32 (fp64 in fp64 runs)."""
        state = self.kinds[kind]
        wide = torch.float64 if state.data.dtype == torch.float64 else torch.float32
        out = torch.empty(self.size, dtype=wide)
        for start, end in self.chunks():
            out[start:end] = self._numbers(state, start, end)
        return out

    def _numbers(self, state: PackedState, start: int, end: int) -> Tensor:
        """Unpacked values of elements `start` to `end`, on the device of `state`."""
        part = state.part(start, end)
        needs_weights = part.format == "remainder"
        return unpack(part, self.weights[start:end].to(part.data.device) if needs_weights else None)

    def write(self, kind: str, numbers: Tensor) -> None:
        """Stores `numbers`, values of one kind as returned by `read`. In the format "remainder", the parameters contain
        the high bits of the master weights, so `write` sets the parameters too."""
        state = self.kinds[kind]
        for start, end in self.chunks():
            part, weights = state.part(start, end), self.weights[start:end]
            new = numbers[start:end].to(state.data.device)
            rounded = round_weights(new, weights.dtype)
            if part.format == "remainder":
                weights.copy_(rounded)
            _copy(part, pack(new, part, rounded))

    def weights_from_master(self) -> None:
        """Sets parameters to the rounded master weights or, if not `saves_master`, master weights to the parameters."""
        master = self.kept.master
        if master is None or master.format == "remainder":
            return
        if not self.saves_master:
            self.master_from_weights()
            return
        self.write_weights()

    def write_weights(self) -> None:
        """Sets the parameters to the rounded master weights."""
        for start, numbers in self.masters(_CHUNK):
            self.weights[start : start + len(numbers)] = round_weights(numbers, self.weights.dtype)

    def masters(self, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields (start, values) of at most `size` consecutive master weights, which must not be remainders; None: as
        many as possible without a large temporary tensor. Offsets count from the start of this state. Values are fp32
        (fp64 in fp64 runs) and on the device; the current stream waits for copies from host memory."""
        master = self.kept.master
        assert master is not None, "the parameters are the master weights"
        most = _CHUNK
        if self.placement == "device":
            most = self.size if master.format == "plain" else _CHUNK_IN_STEP
        for start, end in self.chunks(size or most):
            part = master.part(start, end)
            if self.placement != "device":
                on_host, part = part, part.like(self.grads.device)
                allocated = self.copies.record()
                for into, source in zip(part.parts, on_host.parts, strict=True):
                    self.copies.wait(self.copies.to_device(into, source, allocated))
            yield start, unpack(part)

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
        if master.format == "plain" and self.placement == "device":
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
    """Creates the state of all ranges that this rank owns in a buffer. Masters equal the weights; moments are zero.

    The first `config.fraction` of the owned elements, rounded up to whole blocks, have their state in host memory.
    """
    on_host = int(config.fraction * sum(end - start for start, end in buffer.owned))
    for start, end in buffer.owned:
        middle = min(start + -(-on_host // BLOCK) * BLOCK, end) if on_host > 0 else start
        if start < middle:
            placement: StatePlacement = "host" if config.cpu_step else "streamed"
            yield _new_state(buffer, (start, middle), moments, precision, placement, copies)
        if middle < end:
            yield _new_state(buffer, (middle, end), moments, precision, "device", copies)
        on_host -= middle - start


def _new_state(
    buffer: FlatBuffer,
    owned: Range,
    moments: Sequence[MomentSpec],
    precision: PrecisionConfig,
    placement: StatePlacement,
    copies: HostCopies,
) -> OptimizerState:
    start, end = owned
    weights = buffer.weights[start:end]
    fp64 = precision.main_params_dtype == "fp64"
    saves_master = weights.dtype != torch_dtype(precision.main_params_dtype)

    def zeros(name: Format, plain: torch.dtype, *, root: bool = False) -> PackedState:
        device = weights.device if placement == "device" else torch.device("meta")
        state = PackedState.zeros(end - start, name, torch.float64 if fp64 else plain, device, root=root)
        if placement == "device":
            return state
        parts = [copies.host_buffer(part.numel(), part.dtype, pinned=placement == "streamed") for part in state.parts]
        return PackedState(name, parts[0], parts[1] if len(parts) > 1 else None, state.root)

    def moment(spec: MomentSpec) -> PackedState:
        if spec.format in ("fp16", "fp8") and not fp64:
            return zeros(spec.format, torch.float32, root=spec.root)
        return zeros("plain", torch.bfloat16 if spec.format == "bf16" else torch.float32)

    master = None
    if saves_master or placement == "host" or buffer.codes:
        remainders = precision.store_param_remainders and weights.dtype is torch.bfloat16 and placement != "host"
        remainders = remainders and not buffer.codes
        name: Format = "remainder" if remainders else "fp16" if precision.main_params_dtype == "fp16" else "plain"
        master = zeros(name, torch.float32)
    kept = StoredState(master, {spec.kind: moment(spec) for spec in moments})
    state = OptimizerState(buffer, start, end, buffer.grads[start:end], kept, placement, copies, saves_master)
    state.master_from_weights()
    return state
