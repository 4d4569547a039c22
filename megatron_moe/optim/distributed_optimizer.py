"""AdamW over flat buffers, with master weights (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.optim.clip_grads import counted, over_the_world
from megatron_moe.optim.cpu_offload import (
    CPUStep,
    StreamedStep,
    Update,
    apply,
)
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.overlapped_step import (
    OverlappedOptimizerStep,
    pieces_of,
)
from megatron_moe.optim.param_gather import WeightGather, gather_in_forward_hooks
from megatron_moe.optim.param_layout import reduction_order
from megatron_moe.optim.state import AdamState, StateKind, new_states
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.streams import make_host_copies, make_streams


@dataclass(frozen=True)
class StateRange:
    """What this rank owns of one kind of state of one parameter."""

    name: str
    """Global name of the parameter."""
    kind: StateKind
    parameter: Parameter
    start: int
    """First element in this rank's part of the parameter, in row-major order."""
    data: Tensor
    """[n] in fp32 (fp64 of fp64): the state itself, or a copy of it in host memory where it is kept in another format.
    Copying into it restores the state once `weights_from_masters` has been called."""

    @property
    def whole(self) -> Tensor:
        """In the parameter's shape, for a rank that owns all of it."""
        return self.data.view(self.parameter.shape)


class Optimizer:
    """Steps what this rank owns of the buffers. Master weights start as the weights at construction.

    Args:
        precision: formats of master weights and moments. Where they are is in the buffers' `OptimizerConfig`.
    """

    def __init__(self, buffers: GradBuffers, precision: PrecisionConfig) -> None:
        self.buffers = buffers
        self.config = buffers.optimizer
        self._host_copies = make_host_copies(buffers.device)
        self.step_count = torch.zeros((), dtype=torch.int64, device=buffers.device)
        """Updates applied so far, on the device."""
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=buffers.device)
        """True once an update has stored a weight or moment that is not finite, on this rank. Never reset."""
        self.states = tuple(
            state
            for buffer in buffers.buffers
            for state in new_states(buffer, precision, self.config.offload, self._host_copies)
        )
        self._copies: list[tuple[AdamState, StateKind, Tensor]] = []
        """What `named_state` last gave of state in other formats."""
        around = (self.config, buffers.kernels, self._host_copies)
        self._visits = StreamedStep([state for state in self.states if state.home == "parked"], *around)
        self._host_steps = CPUStep([state for state in self.states if state.home == "host"], *around)
        self._gather = _weight_gather(buffers) if buffers.data_parallel.sharded_optimizer else None
        self._gather_in_forward = False
        self._beside: OverlappedOptimizerStep | None = None

    def step_in_forward(self, model: nn.Module) -> None:
        """From now on `step` returns while updates are under way, and the layers of `model` wait for their own weights.

        Who reads weights or state in another way, or writes gradients, calls `finish_gather` first.
        """
        assert all(state.home == "device" for state in self.states), "state in host memory is stepped by other means"
        buckets = []
        for number, index in _forward_order(self.buffers):
            buffer = self.buffers.buffers[number]
            mine = [state for state in self.states if state.buffer is buffer]
            buckets.append(pieces_of(mine, *buffer.layout.buckets[index]))
        streams = make_streams(self.buffers.device, "optimizer")
        self._beside = OverlappedOptimizerStep(buckets, self.config, self.buffers.kernels, streams, self._gather)
        gather_in_forward_hooks(model, self._beside, self._bucket_of())

    def gather_in_forward(self, model: nn.Module) -> None:
        """From now on `step` returns while new weights travel, and the layers of `model` wait for their own.

        Who reads weights in another way calls `finish_gather` first.
        """
        assert self._gather is not None, "only a sharded optimizer gathers weights"
        if self._gather.travels:  # else hooks of all modules would wait for nothing
            gather_in_forward_hooks(model, self._gather, self._bucket_of())
        self._gather_in_forward = True

    def finish_gather(self) -> None:
        """Waits until the last step is over and its weights are here."""
        for arrivals in (self._beside, self._gather):
            if arrivals is not None:
                arrivals.finish()

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        weight_decay: float,
        grad_scale: Tensor,
        proceed: Tensor,
        decoupled_lr: float | None = None,
    ) -> None:
        """One update from the finished gradients.

        Args:
            grad_scale: scalar on the device that multiplies every gradient (the clip factor).
            proceed: bool scalar on the device. False: weights, moments and step count keep their very bits, whatever
                the gradients hold.
            decoupled_lr: learning rate of embedding and head when the run has one of their own.
        """
        assert (decoupled_lr is None) == (self.config.decoupled_lr is None), f"decoupled learning rate {decoupled_lr}"
        self.finish_gather()
        self.step_count.add_(proceed.to(torch.int64))
        self._copies = []
        # a refused first step must not divide by 1 - beta^0
        number = self.step_count.clamp(min=1)
        update = Update(lr, decoupled_lr, weight_decay, number, grad_scale, proceed, self.nonfinite)
        if self._beside is not None:
            self._beside.start(update)
            return
        for state in self.states:
            if state.home == "device":
                kernels = self.buffers.kernels
                apply(update, self.config, kernels, state, state.kept, state.weights, state.grads, state.start)
        self._visits.run(update)
        self._host_steps.run(update)
        self._start_gather()
        if not self._gather_in_forward:
            self.finish_gather()

    def weights_from_masters(self) -> None:
        """Takes over what was copied into `named_state`, and rounds the master weights to the parameters of all ranks.
        Nothing to do where the parameters are the masters of one rank."""
        self.finish_gather()
        self._host_copies.synchronize_all()
        for state, kind, numbers in self._copies:
            state.write(kind, numbers)
        self._copies = []
        for state in self.states:
            state.weights_from_master()
        self._start_gather()
        self.finish_gather()

    def masters_from_weights(self) -> None:
        """Takes new weights (initialised, or loaded without optimizer state) as master weights."""
        self.finish_gather()
        self._host_copies.synchronize_all()
        self._copies = []
        for state in self.states:
            state.master_from_weights()

    def named_state(self) -> Iterator[StateRange]:
        """All state that this rank owns, besides `step_count`, in a form that does not depend on how it is kept.

        Copying into the data restores the state; `weights_from_masters` must follow.
        """
        self.finish_gather()
        self._host_copies.synchronize_all()
        self._copies = []
        for state in self.states:
            flats = {kind: self._numbers(state, kind) for kind in state.kinds}
            for place, slot in zip(state.buffer.layout.places, state.buffer.slots, strict=True):
                start, end = max(place.start, state.start), min(place.end, state.end)
                if start < end:
                    for kind, flat in flats.items():
                        data = flat[start - state.start : end - state.start]
                        yield StateRange(place.name, kind, slot.parameter, start - place.start, data)

    def _numbers(self, state: AdamState, kind: StateKind) -> Tensor:
        packed = state.kinds[kind]
        if packed.format == "plain" and packed.data.dtype in (torch.float32, torch.float64):
            return packed.data
        numbers = state.read(kind)
        self._copies.append((state, kind, numbers))
        return numbers

    def params_norm(self) -> Tensor:
        """L2 norm of the master weights, every element of the model once. A scalar on the device."""
        self.finish_gather()
        if any(state.home != "device" for state in self.states):
            self._host_copies.synchronize_all()
        kernels, counting = self.buffers.kernels, {id(buffer) for buffer in counted(self.buffers)}
        squares = [state.sum_of_squares(kernels) for state in self.states if id(state.buffer) in counting]
        if squares:
            total = torch.stack(squares).sum()
        else:
            total = torch.zeros((), dtype=internal_dtype(self.buffers.context.dtype), device=self.buffers.device)
        # world: 4 or 8 bytes
        return over_the_world(total, self.buffers, self.buffers.context).sqrt()

    def _bucket_of(self) -> dict[int, int]:
        """Place of a parameter's bucket in forward order, by `id` of the parameter."""
        order = {at: index for index, at in enumerate(_forward_order(self.buffers))}
        return {
            id(slot.parameter): order[number, place.bucket]
            for number, buffer in enumerate(self.buffers.buffers)
            for place, slot in zip(buffer.layout.places, buffer.slots, strict=True)
        }

    def _start_gather(self) -> None:
        if self._gather is not None:
            self._gather.start()


def _forward_order(buffers: GradBuffers) -> list[tuple[int, int]]:
    """(buffer, bucket) in the order in which a forward pass needs the weights."""
    return list(reversed(reduction_order(buffers.layout)))


def _weight_gather(buffers: GradBuffers) -> WeightGather:
    buckets = []
    for number, index in _forward_order(buffers):
        buffer = buffers.buffers[number]
        start, end = buffer.layout.buckets[index]
        buckets.append((buffer.weights[start:end], buffer.group))
    return WeightGather(buckets)
