"""Optimizer state of the ranges that a rank owns, stored in device or host memory, and the interface of update
rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.update_rules import StateSpec, spec_of
from megatron_moe.kernels.ops import Kernels, all_finite
from megatron_moe.optim.grad_buffers import FlatBuffer
from megatron_moe.optim.param_layout import BufferKey, Range
from megatron_moe.optim.param_slices import ParamSlice
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.streams import HostCopies
from megatron_moe.precision.dither import dither
from megatron_moe.precision.optimizer_state import BLOCK, Format, PackedState, pack, round_weights, unpack

StatePlacement = Literal["device", "host", "streamed"]
"""Location of optimizer state. device: the state is stored and updated on the device. host: it is stored in host memory
and updated on the CPU. streamed: it is stored in host memory and updated on the device."""
_CHUNK = 1 << 22
"""Number of elements converted at a time when state is read or written outside of steps."""
_CHUNK_IN_STEP = 1 << 26
"""Number of elements converted at a time in steps, large enough to hide launch overhead."""


class MatrixState(NamedTuple):
    """Location of one parameter's values in a flat state tensor that belongs to whole matrices."""

    spec: StateSpec
    start: int
    """Offset of the first value in the flat state."""
    first_matrix: int
    """Index, among the parameter's matrices, of the matrix that the first value belongs to."""


class StoredState(NamedTuple):
    """Master weights and other optimizer state of consecutive elements."""

    master: PackedState | None
    """Master weights; None means that the parameters themselves are the master weights."""
    states: Mapping[str, PackedState]
    """State of the update rule by name ("exp_avg"), in the order of its declaration."""

    @property
    def packed_states(self) -> tuple[PackedState, ...]:
        return (*(() if self.master is None else (self.master,)), *self.states.values())

    @property
    def tensors(self) -> list[Tensor]:
        return [part for each in self.packed_states for part in each.parts]

    def part(self, start: int, end: int) -> "StoredState":
        """Views of elements `start` to `end`; `start` must be a multiple of `BLOCK` (elements that share a scale)."""
        states = {kind: state.part(start, end) for kind, state in self.states.items()}
        return StoredState(None if self.master is None else self.master.part(start, end), states)

    def new_empty(self, device: torch.device) -> "StoredState":
        """Allocates uninitialised state of the same formats and sizes on another device."""
        states = {kind: state.new_empty(device) for kind, state in self.states.items()}
        return StoredState(None if self.master is None else self.master.new_empty(device), states)


class UpdateOperands(NamedTuple):
    """All tensors that an update of consecutive elements of a flat buffer reads and writes."""

    buffer_key: BufferKey
    start: int
    """Offset of the first element in the buffer."""
    weights: Tensor | None
    """Weights to be written. None if the weights are stored in FP8 or FP4, so that only the master weights are
    updated."""
    grads: Tensor
    stored: StoredState
    state: "OptimizerState"
    """Optimizer state from which these operands were created."""

    @property
    def param_slices(self) -> Sequence[ParamSlice]:
        """Slices of parameters that together consist of the elements, without padding."""
        return self.state.slices_between(self.start, self.start + len(self.grads))

    def grad(self, param: ParamSlice) -> Tensor:
        """Gradient of a parameter slice before clipping, as this rank's TP shard of each of its n matrices: [n, rows,
        columns]."""
        return param.matrices(self.grads, self.start)

    def master(self, param: ParamSlice) -> Tensor:
        """Master weights of a slice in fp32 (fp64 in fp64 runs), in the shape of `grad`."""
        values = unpack(*self.stored_master(param))
        return param.matrices(values, param.start)

    def values(self, kind: str, param: ParamSlice) -> Tensor:
        """Stored state of a slice in the shape of `grad`, or [n, *shape] if the declaration has a `matrix_shape`."""
        spec, start, first_matrix = self.state.matrix_states[kind, param.name]
        data = self.stored.states[kind].data
        if spec.matrix_shape is None:
            return param.matrices(data, self.start)
        shape = spec.matrix_shape(*param.whole_shape)
        start += (param.first_matrix - first_matrix) * prod(shape)
        return data[start : start + param.num_matrices * prod(shape)].view(-1, *shape)

    def commit(self, scalars: "StepScalars", param: ParamSlice, master: Tensor, **states: Tensor) -> None:
        """Stores new master weights and state of a slice, in the shapes that `master` and `values` return.

        Nothing changes if the step is rejected. Otherwise `StepScalars.nonfinite` is set if a value is not finite.
        """
        self.commit_state(scalars, param, **states)
        apply = scalars.apply_update
        new = torch.where(apply, master, self.master(param)).flatten()
        scalars.nonfinite.logical_or_(apply & ~all_finite(new))
        stored, weights = self.stored_master(param)
        rounded = new if weights is None else round_weights(new, weights.dtype)
        if weights is not None:
            weights.copy_(rounded)
        _copy(stored, pack(new, stored, rounded))

    def chunks(self, most_elements: int) -> Iterator["UpdateOperands"]:
        """Yields operands of at most `most_elements` (a multiple of `BLOCK`) consecutive elements, for rules that
        update every element independently."""
        for start in range(0, len(self.grads), most_elements):
            end = min(start + most_elements, len(self.grads))
            weights, stored = None if self.weights is None else self.weights[start:end], self.stored.part(start, end)
            yield self._replace(start=self.start + start, weights=weights, grads=self.grads[start:end], stored=stored)

    @property
    def flat_master(self) -> Tensor:
        """Master weights of all elements in fp32 (fp64 in fp64 runs), [n]."""
        if self.stored.master is not None:
            return unpack(self.stored.master, self.weights)
        assert self.weights is not None, "neither weights nor master weights"
        return self.weights

    def flat_values(self, kind: str) -> Tensor:
        """State of all elements in the dtype of `flat_master`, [n]."""
        return unpack(self.stored.states[kind]).to(self.flat_master.dtype)

    def commit_flat(self, scalars: "StepScalars", master: Tensor, **states: Tensor) -> None:
        """Stores new master weights and state of all elements, [n] each, as `commit` does for matrices."""
        apply, weights = scalars.apply_update, self.weights
        stored = self.stored.master or PackedState("plain", self.flat_master)
        rounded = None if weights is None else round_weights(master, weights.dtype)
        new = [(stored, pack(master, stored, rounded))]
        if rounded is not None and stored.format == "fp16":
            rounded = round_weights(unpack(new[0][1]), rounded.dtype)
        for salt, (kind, values) in enumerate(states.items()):
            old = self.stored.states[kind]
            noise = dither(old.size, scalars.step, salt, self.start, values.device) if old.format == "fp8" else None
            new.append((old, pack(values, old, dither=noise)))
        for old, packed in new:
            for into, part in zip(old.parts, packed.parts, strict=True):
                into.copy_(torch.where(apply, part, into))
        if weights is not None and rounded is not None:
            weights.copy_(torch.where(apply, rounded, weights))
        for values in (master, *states.values(), *(() if weights is None else (weights,))):
            scalars.nonfinite.logical_or_(apply & ~all_finite(values))

    def commit_state(self, scalars: "StepScalars", param: ParamSlice, **states: Tensor) -> None:
        """Stores new state of whole matrices as `commit` does."""
        for kind, new in states.items():
            old = self.values(kind, param)
            old.copy_(torch.where(scalars.apply_update, new.to(old.dtype), old))
            scalars.nonfinite.logical_or_(scalars.apply_update & ~all_finite(old))

    def step(self, scalars: "StepScalars", kernels: Kernels) -> None:
        """Updates the elements by the rule of their state, then multiplies rows by `StepScalars.row_factors`."""
        self.state.rule.step(scalars, self, kernels)
        for param in self.param_slices if scalars.row_factors else ():
            if param.parameter in scalars.row_factors:
                self._multiply_rows(param, scalars.row_factors[param.parameter])

    def _multiply_rows(self, param: ParamSlice, factors: Tensor) -> None:
        """Multiplies the weights of a slice, which may begin and end inside rows, by the factors of their rows."""
        stored, weights = self.stored_master(param)
        old = unpack(stored, weights)
        first = param.start - param.slot.start
        place = torch.arange(first, first + len(old), device=old.device)
        new = old * factors.to(old.dtype)[place // (param.slot.parameter.numel // len(factors))]
        rounded = new if weights is None else round_weights(new, weights.dtype)
        _copy(stored, pack(new, stored, rounded))
        if weights is not None:
            weights.copy_(rounded)

    def stored_master(self, param: ParamSlice) -> tuple[PackedState, Tensor | None]:
        """Returns (stored master weights of a slice, weights of the slice or None if the masters are the weights or the
        weights are stored in FP8 or FP4)."""
        part = slice(param.start - self.start, param.end - self.start)
        weights = None if self.weights is None else self.weights[part]
        if self.stored.master is None:
            assert weights is not None, "neither weights nor master weights"
            return PackedState("plain", weights), None
        master = self.stored.master
        assert master.exponents is None, f"whole matrices with master weights in {master.format}"
        return PackedState(master.format, master.data[part]), weights


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
    """bool; if False, weights and state stay unchanged."""
    nonfinite: Tensor
    """bool, set to True by the update if a stored weight or moment is not finite."""
    row_factors: Mapping[Parameter, Tensor] = field(default_factory=dict)
    """Per parameter, one factor per row of this rank's shard; the new weights are multiplied by them (QK-clip)."""

    def lr_of(self, key: BufferKey) -> float:
        """Learning rate of the parameters in a buffer."""
        return self.decoupled_lr if key.decoupled_lr and self.decoupled_lr is not None else self.lr

    def weight_decay_of(self, key: BufferKey) -> float:
        """Weight decay of the parameters in a buffer."""
        return self.weight_decay if key.decay else 0.0


class UpdateRule(Protocol):
    """Update rule of an optimizer; an `UpdateRuleSpec` declares its state and its alignment."""

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights and state in place. `kernels` must run on the device of the operands."""


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state of one range of a flat buffer. This rank owns the range."""

    buffer: FlatBuffer
    start: int
    """Offset of the range in the buffer, in elements."""
    end: int
    grads: Tensor
    """View of the buffer's gradients in the range."""
    stored: StoredState
    placement: StatePlacement
    copies: HostCopies
    """Copies between the device and host memory."""
    saves_master: bool
    """True if master weights have another dtype than the parameters, so that checkpoints must contain them."""
    rule: UpdateRule
    matrix_states: Mapping[tuple[str, str], MatrixState]
    """(kind, name of the parameter) -> declaration of the state, and offset of the parameter's values in it. Empty
    unless the rule updates whole matrices."""

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def weights(self) -> Tensor:
        """Weights in the range, in the dtype of the parameters."""
        return self.buffer.owned_weights(self.start, self.end)

    @cached_property
    def param_slices(self) -> tuple[ParamSlice, ...]:
        """Parameters, or parts of them, in the range."""
        return tuple(self.buffer.param_slices(self.start, self.end))

    def slices_between(self, start: int, end: int) -> Sequence[ParamSlice]:
        """Parameters, or parts of them, between two offsets in the buffer."""
        return (
            self.param_slices if (start, end) == (self.start, self.end) else tuple(self.buffer.param_slices(start, end))
        )

    @property
    def kinds(self) -> dict[str, PackedState]:
        """State that checkpoints contain, by kind: "master" for master weights, otherwise the name in
        `StoredState.states`."""
        states = dict(self.stored.states)
        return {"master": self.stored.master, **states} if self.saves_master and self.stored.master else states

    def operands(self, start: int = 0, end: int | None = None) -> UpdateOperands:
        """Views of elements `start` (a multiple of `BLOCK`) to `end`, counted from the start of this state."""
        end = self.size if end is None else end
        stored = self.stored if (start, end) == (0, self.size) else self.stored.part(start, end)
        weights = None if self.buffer.codes else self.weights[start:end]
        return UpdateOperands(self.buffer.key, self.start + start, weights, self.grads[start:end], stored, self)

    def chunks(self, size: int = _CHUNK, total: int | None = None) -> Iterator[Range]:
        """Yields (start, end) of chunks of at most `size` elements. `total`: number of elements to divide; None means
        all elements of this state. Offsets count from the start of this state."""
        size, total = max(size // BLOCK * BLOCK, BLOCK), self.size if total is None else total
        for start in range(0, total, size):
            yield start, min(start + size, total)

    def read_values(self, kind: str) -> Tensor:
        """Returns the values of one kind of state: a copy in host memory, in fp32 (fp64 in fp64 runs)."""
        state = self.kinds[kind]
        wide = torch.float64 if state.data.dtype == torch.float64 else torch.float32
        out = torch.empty(state.size, dtype=wide)
        for start, end in self.chunks(total=state.size):
            out[start:end] = self._unpacked(state, start, end)
        return out

    def _unpacked(self, state: PackedState, start: int, end: int) -> Tensor:
        """Unpacked values of elements `start` to `end`, on the device of `state`."""
        part = state.part(start, end)
        needs_weights = part.format == "remainder"
        return unpack(part, self.weights[start:end].to(part.data.device) if needs_weights else None)

    def write_values(self, kind: str, values: Tensor) -> None:
        """Stores `values` of one kind as returned by `read_values`. In the format "remainder", the parameters contain
        the high bits of the master weights, so `write_values` sets the parameters too."""
        state = self.kinds[kind]
        for start, end in self.chunks(total=state.size):
            part, new, rounded = state.part(start, end), values[start:end].to(state.data.device), None
            if part.format == "remainder":
                rounded = round_weights(new, self.weights.dtype)
                self.weights[start:end] = rounded
            _copy(part, pack(new, part, rounded))

    def weights_from_master(self) -> None:
        """Sets parameters to the rounded master weights or, if not `saves_master`, master weights to the parameters."""
        master = self.stored.master
        if master is None or master.format == "remainder":
            return
        if not self.saves_master:
            self.master_from_weights()
            return
        self.write_weights()

    def write_weights(self) -> None:
        """Sets the parameters to the rounded master weights."""
        for start, values in self.masters(_CHUNK):
            self.weights[start : start + len(values)] = round_weights(values, self.weights.dtype)

    def masters(self, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields the master weights in chunks: (index of the first element in this state, values).

        A chunk has at most `size` elements; without `size`, temporary tensors stay small. Values are fp32 (fp64 in fp64
        runs) and on the device; the current stream waits for copies from host memory. Does not support the format
        "remainder", in which the parameters contain the high bits of the master weights.
        """
        master = self.stored.master
        assert master is not None, "the parameters are the master weights"
        most = _CHUNK
        if self.placement == "device":
            most = self.size if master.format == "plain" else _CHUNK_IN_STEP
        for start, end in self.chunks(size or most):
            part = master.part(start, end)
            if self.placement != "device":
                on_host, part = part, part.new_empty(self.grads.device)
                allocated = self.copies.record()
                for into, source in zip(part.parts, on_host.parts, strict=True):
                    self.copies.wait(self.copies.to_device(into, source, allocated))
            yield start, unpack(part)

    def master_from_weights(self) -> None:
        """Sets the master weights from the parameters."""
        master = self.stored.master
        if master is None or self.weights.is_meta:
            return
        for start, end in self.chunks():
            part, weights = master.part(start, end), self.weights[start:end].to(master.data.device)
            wide = weights.to(torch.float64 if part.data.dtype == torch.float64 else torch.float32)
            _copy(part, pack(wide, part, weights))

    def sum_of_squares(self, kernels: Kernels) -> Tensor:
        """Sum of squares of the master weights, a scalar on the device."""
        master = self.stored.master
        if master is None:
            return kernels.sum_of_squares(self.weights)
        if master.format == "plain" and self.placement == "device":
            return kernels.sum_of_squares(master.data)
        device = self.weights.device
        parts = (self._unpacked(master, start, end).to(device) for start, end in self.chunks())
        return torch.stack([kernels.sum_of_squares(part) for part in parts]).sum()


def _copy(into: PackedState, source: PackedState) -> None:
    for old, new in zip(into.parts, source.parts, strict=True):
        old.copy_(new)


def new_states(
    buffer: FlatBuffer, rule: UpdateRule, config: OptimizerConfig, precision: PrecisionConfig, copies: HostCopies
) -> Iterator[OptimizerState]:
    """Creates the state of all ranges that this rank owns in a buffer. Masters equal the weights; other state is zero.

    The first `config.offload.fraction` of the owned elements, rounded up to whole blocks, have their state in host
    memory. A rule for whole matrices has a state per bucket.
    """
    offload = config.offload
    whole = spec_of(buffer.key.rule).alignment == "matrix"
    assert not (whole and offload.fraction), "state in host memory is stepped in chunks of elements"
    owned = buffer.owned
    if whole:
        parts = ((max(start, a), min(end, b)) for start, end in owned for a, b in buffer.layout.buckets)
        owned = tuple((start, end) for start, end in parts if start < end)
    on_host = int(offload.fraction * sum(end - start for start, end in owned))
    for start, end in owned:
        middle = min(start + -(-on_host // BLOCK) * BLOCK, end) if on_host > 0 else start
        if start < middle:
            placement: StatePlacement = "host" if offload.cpu_step else "streamed"
            yield _new_state(buffer, (start, middle), rule, config, precision, placement, copies)
        if middle < end:
            yield _new_state(buffer, (middle, end), rule, config, precision, "device", copies)
        on_host -= middle - start


def _new_state(
    buffer: FlatBuffer,
    owned: Range,
    rule: UpdateRule,
    config: OptimizerConfig,
    precision: PrecisionConfig,
    placement: StatePlacement,
    copies: HostCopies,
) -> OptimizerState:
    start, end = owned
    weights = buffer.owned_weights(start, end)
    fp64 = precision.main_params_dtype == "fp64"
    saves_master = weights.dtype != torch_dtype(precision.main_params_dtype)
    matrix_states: dict[tuple[str, str], MatrixState] = {}

    def new_packed_state(name: Format, plain: torch.dtype, size: int, *, root: bool = False) -> PackedState:
        device = weights.device if placement == "device" else torch.device("meta")
        state = PackedState.zeros(size, name, torch.float64 if fp64 else plain, device, root=root)
        if placement == "device":
            return state
        parts = [copies.host_buffer(part.numel(), part.dtype, pinned=placement == "streamed") for part in state.parts]
        return PackedState(name, parts[0], parts[1] if len(parts) > 1 else None, state.root)

    def new_declared_state(spec: StateSpec) -> PackedState:
        size = end - start
        if spec_of(buffer.key.rule).alignment == "matrix":
            assert spec.format in ("fp32", "bf16"), f"{spec.name} of whole matrices in {spec.format}"
            size = 0 if spec.matrix_shape else size
            for param in buffer.param_slices(start, end):
                matrix_states[spec.name, param.name] = MatrixState(spec, size, param.first_matrix)
                size += param.num_matrices * spec.values_of(*param.whole_shape) if spec.matrix_shape else 0
        if spec.format in ("fp16", "fp8") and not fp64:
            return new_packed_state(spec.format, torch.float32, size, root=spec.root)
        return new_packed_state("plain", torch.bfloat16 if spec.format == "bf16" else torch.float32, size)

    master = None
    if saves_master or placement == "host" or buffer.codes:
        remainders = precision.store_param_remainders and weights.dtype is torch.bfloat16 and placement != "host"
        remainders = remainders and not buffer.codes
        name: Format = "remainder" if remainders else "fp16" if precision.main_params_dtype == "fp16" else "plain"
        master = new_packed_state(name, torch.float32, end - start)
    stored = StoredState(
        master, {spec.name: new_declared_state(spec) for spec in spec_of(buffer.key.rule).states(config, precision)}
    )
    grads = buffer.owned_grads(start, end)
    state = OptimizerState(
        buffer, start, end, grads, stored, placement, copies, saves_master, rule, MappingProxyType(matrix_states)
    )
    state.master_from_weights()
    return state
