"""AdamW over flat buffers, with master weights (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.optim.buckets import FlatBuffer, GradBuffers
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.specs.precision import PrecisionSpec

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class AdamState:
    """State of one flat buffer, in the master dtype."""

    buffer: FlatBuffer
    master: Tensor
    """The buffer's own weights where their dtype is the master dtype, else a copy of higher precision."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def owns_master(self) -> bool:
        return self.master is not self.buffer.weights


class Optimizer:
    """Steps all parameters of the buffers. Master weights start as the weights at construction.

    Args:
        precision: `master` is the dtype of master weights and moments.
    """

    def __init__(self, buffers: GradBuffers, precision: PrecisionSpec) -> None:
        self.buffers = buffers
        self.spec = buffers.optimizer
        self.step_count = torch.zeros((), dtype=torch.int64, device=buffers.device)
        """Updates applied so far, on the device."""
        master_dtype = torch_dtype(precision.master)
        self.states = tuple(_new_state(buffer, master_dtype) for buffer in buffers.buffers)

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
        self.step_count.add_(proceed.to(torch.int64))
        for state in self.states:
            key = state.buffer.key
            self.buffers.kernels.adamw_(
                state.master,
                state.buffer.grads,
                state.exp_avg,
                state.exp_avg_sq,
                lr=decoupled_lr if key.decoupled_lr and decoupled_lr is not None else lr,
                beta1=self.spec.beta1,
                beta2=self.spec.beta2,
                eps=self.spec.eps,
                weight_decay=weight_decay if key.decay else 0.0,
                # A refused first step must not divide by 1 - beta^0.
                step=self.step_count.clamp(min=1),
                grad_scale=grad_scale,
                proceed=proceed,
            )
        self.weights_from_masters()

    def weights_from_masters(self) -> None:
        """Rounds the master weights to the parameters. Nothing to do where the parameters are the masters."""
        for state in self.states:
            if state.owns_master:
                state.buffer.weights.copy_(state.master)

    def masters_from_weights(self) -> None:
        """Takes new weights (initialised, or loaded without optimizer state) as master weights."""
        for state in self.states:
            if state.owns_master:
                state.master.copy_(state.buffer.weights)

    def named_state(self) -> Iterator[tuple[str, StateKind, Tensor]]:
        """(global parameter name, kind, view in the parameter's shape) of all state besides `step_count`.

        Copying into the views restores the state; `weights_from_masters` must follow. Kind "master" is absent where the
        parameters themselves are the masters.
        """
        for state in self.states:
            kinds: dict[StateKind, Tensor] = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
            if state.owns_master:
                kinds = {"master": state.master, **kinds}
            for kind, flat in kinds.items():
                for name, view in state.buffer.views(flat):
                    yield name, kind, view

    def params_norm(self) -> Tensor:
        """L2 norm of the master weights, scalar on the device."""
        squares = [self.buffers.kernels.sum_of_squares(state.master) for state in self.states]
        return torch.stack(squares).sum().sqrt()


def _new_state(buffer: FlatBuffer, master_dtype: torch.dtype) -> AdamState:
    weights = buffer.weights
    master = weights if weights.dtype == master_dtype else weights.to(master_dtype)
    return AdamState(buffer, master, torch.zeros_like(master), torch.zeros_like(master))
