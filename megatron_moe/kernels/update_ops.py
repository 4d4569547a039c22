"""Kernel ops of the optimizer's update rules, inherited by `kernels.ops.Kernels`."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.precision.optimizer_state import PackedState


class AdamWState(NamedTuple):
    """Flat optimizer state of AdamW in the formats of `precision/optimizer_state.py`."""

    master: PackedState
    exp_avg: PackedState
    exp_avg_sq: PackedState


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Hyperparameters and device scalars of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    """Number of this update, starting at 1, used for the bias corrections: int64 scalar on the device."""
    grad_scale: Tensor
    """Scalar on the device by which the gradient is multiplied (gradient clipping)."""
    apply_update: Tensor
    """bool scalar on the device. False: weights and state remain unchanged, even if the gradient is not finite."""
    nonfinite: Tensor
    """bool scalar on the device. Ops set it to True if they store a non-finite weight or moment, and never to False."""


@dataclass(frozen=True, kw_only=True)
class MatrixStep:
    """Hyperparameters and device scalars of one step of a rule for whole matrices; see `AdamWStep`."""

    lr: float
    weight_decay: float
    grad_scale: Tensor
    apply_update: Tensor
    nonfinite: Tensor


class UpdateOps(Protocol):
    """Kernel ops over flat buffers and over whole matrices that the optimizer needs."""

    # elementwise, over flat buffers
    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Sum of the squared elements as a scalar in the internal dtype."""

    def sum_contributions_(self, out: Tensor, own: Tensor, received_PN: Tensor, rank: int, *, accumulate: bool) -> None:
        """Sets `out` [N] to the sum of the contributions of several ranks or, if `accumulate`, adds the sum to it.

        `own` [N] is the contribution of this rank, whose index is `rank`. The rows of `received_PN`, which may be any
        distance apart, are those of the other ranks in rank order. Contributions are added in rank order in
        promote(fp32, dtype of `out`), and the result is rounded once."""

    def adamw_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        move: AdamWStep,
        weights: Tensor | None = None,
    ) -> None:
        """Applies one AdamW step in place to flat tensors. If given, `weights` is set to the updated master weights,
        rounded to its dtype by `optimizer_state.round_weights`. Afterwards, the content of `grad` is undefined."""

    def adamw_packed_(
        self, state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
    ) -> None:
        """Variant of `adamw_` for low-precision state, computed in fp32. `first`: index of the state's first
        element in the whole buffer. The random numbers of stochastic rounding depend on these indices."""

    # whole matrices
    def momentum_(
        self,
        grad: Tensor,
        momentum: Tensor,
        beta: float,
        move: MatrixStep,
        dtype: torch.dtype,
        *,
        nesterov: bool = False,
    ) -> Tensor:
        """Sets momentum to beta * momentum + (1 - beta) * grad_scale * grad, all flat, and returns it in `dtype`. With
        `nesterov`, returns beta * momentum + (1 - beta) * grad_scale * grad with the new momentum."""

    def apply_direction_(
        self, master: PackedState, direction: Tensor, factor: float, move: MatrixStep, weights: Tensor | None = None
    ) -> None:
        """Applies an update direction: sets flat master weights (plain or remainder) to master * (1 - lr *
        weight_decay) - lr * factor * direction and, if given, `weights` to their rounded values."""

    def syrk(self, x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
        """Returns alpha * x x^T + beta * base for matrices x [n, M, K] and symmetric matrices `base` [n, M, M],
        accumulated in fp32 or wider and rounded to the dtype of x. x may have any strides."""
