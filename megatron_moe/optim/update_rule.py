"""Interface of optimizers that step the ranges a rank owns."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.param_layout import OwnerAlignment
from megatron_moe.optim.state import MomentSpec, UpdateOperands


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
