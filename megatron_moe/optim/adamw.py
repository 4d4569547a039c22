"""AdamW over flat buffers, with master weights (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_moe.optim.buckets import FlatBuffer, GradBuffers
from megatron_moe.optim.clip import counted, over_the_world
from megatron_moe.optim.sharded import Range, WeightGather, wait_in_forward
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.specs.layout_params import reduction_order
from megatron_moe.specs.precision import PrecisionSpec

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]


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
    """[n], a view of the state: copying into it restores the state."""

    @property
    def whole(self) -> Tensor:
        """In the parameter's shape, for a rank that owns all of it."""
        return self.data.view(self.parameter.shape)


@dataclass(frozen=True)
class AdamState:
    """State of a stretch of a flat buffer that this rank owns, in the master dtype."""

    buffer: FlatBuffer
    start: int
    """First element in the buffer."""
    weights: Tensor
    """The buffer's own."""
    grads: Tensor
    """The buffer's own."""
    master: Tensor
    """`weights` where their dtype is the master dtype, else a copy of higher precision."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def end(self) -> int:
        return self.start + self.master.numel()

    @property
    def owns_master(self) -> bool:
        return self.master is not self.weights

    @property
    def kinds(self) -> dict[StateKind, Tensor]:
        """All state. The master weights are absent where the parameters themselves are the masters."""
        moments: dict[StateKind, Tensor] = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {"master": self.master, **moments} if self.owns_master else moments


class Optimizer:
    """Steps what this rank owns of the buffers. Master weights start as the weights at construction.

    Args:
        precision: `master` is the dtype of master weights and moments.
    """

    def __init__(self, buffers: GradBuffers, precision: PrecisionSpec) -> None:
        self.buffers = buffers
        self.spec = buffers.optimizer
        self.step_count = torch.zeros((), dtype=torch.int64, device=buffers.device)
        """Updates applied so far, on the device."""
        master_dtype = torch_dtype(precision.master)
        self.states = tuple(
            _new_state(buffer, owned, master_dtype) for buffer in buffers.buffers for owned in buffer.owned
        )
        self._gather = _weight_gather(buffers) if buffers.data_parallel.sharded_optimizer else None
        self._gather_in_forward = False

    def gather_in_forward(self, model: nn.Module) -> None:
        """From now on `step` returns while new weights travel, and the layers of `model` wait for their own.

        Who reads weights in another way calls `finish_gather` first.
        """
        assert self._gather is not None, "only a sharded optimizer gathers weights"
        order = {at: index for index, at in enumerate(_forward_order(self.buffers))}
        bucket_of = {
            id(slot.parameter): order[number, place.bucket]
            for number, buffer in enumerate(self.buffers.buffers)
            for place, slot in zip(buffer.layout.places, buffer.slots, strict=True)
        }
        wait_in_forward(model, self._gather, bucket_of)
        self._gather_in_forward = True

    def finish_gather(self) -> None:
        """Waits until the weights of the last step are here."""
        if self._gather is not None:
            self._gather.finish()

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
        assert (decoupled_lr is None) == (self.spec.decoupled_lr is None), f"decoupled learning rate {decoupled_lr}"
        self.finish_gather()
        self.step_count.add_(proceed.to(torch.int64))
        number = self.step_count.clamp(min=1)  # a refused first step must not divide by 1 - beta^0
        for state in self.states:
            key = state.buffer.key
            self.buffers.kernels.adamw_(
                state.master,
                state.grads,
                state.exp_avg,
                state.exp_avg_sq,
                lr=decoupled_lr if key.decoupled_lr and decoupled_lr is not None else lr,
                beta1=self.spec.beta1,
                beta2=self.spec.beta2,
                eps=self.spec.eps,
                weight_decay=weight_decay if key.decay else 0.0,
                step=number,
                grad_scale=grad_scale,
                proceed=proceed,
                weights=state.weights if state.owns_master else None,
            )
        self._start_gather()
        if not self._gather_in_forward:
            self.finish_gather()

    def weights_from_masters(self) -> None:
        """Rounds the master weights to the parameters of all ranks. Nothing to do where the parameters are the masters
        of one rank."""
        self.finish_gather()
        for state in self.states:
            if state.owns_master:
                state.weights.copy_(state.master)
        self._start_gather()
        self.finish_gather()

    def masters_from_weights(self) -> None:
        """Takes new weights (initialised, or loaded without optimizer state) as master weights."""
        self.finish_gather()
        for state in self.states:
            if state.owns_master:
                state.master.copy_(state.weights)

    def named_state(self) -> Iterator[StateRange]:
        """All state that this rank owns, besides `step_count`.

        Copying into the data restores the state; `weights_from_masters` must follow.
        """
        for state in self.states:
            for place, slot in zip(state.buffer.layout.places, state.buffer.slots, strict=True):
                start, end = max(place.start, state.start), min(place.end, state.end)
                if start < end:
                    for kind, flat in state.kinds.items():
                        data = flat[start - state.start : end - state.start]
                        yield StateRange(place.name, kind, slot.parameter, start - place.start, data)

    def params_norm(self) -> Tensor:
        """L2 norm of the master weights, every element of the model once. A scalar on the device."""
        kernels, counting = self.buffers.kernels, {id(buffer) for buffer in counted(self.buffers)}
        squares = [kernels.sum_of_squares(state.master) for state in self.states if id(state.buffer) in counting]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=self.states[0].master.dtype)
        # world: 4 or 8 bytes
        return over_the_world(total, self.buffers, self.buffers.context).sqrt()

    def _start_gather(self) -> None:
        if self._gather is not None:
            self._gather.start()


def _new_state(buffer: FlatBuffer, owned: Range, master_dtype: torch.dtype) -> AdamState:
    start, end = owned
    weights, grads = buffer.weights[start:end], buffer.grads[start:end]
    master = weights if weights.dtype == master_dtype else weights.to(master_dtype)
    return AdamState(buffer, start, weights, grads, master, torch.zeros_like(master), torch.zeros_like(master))


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
