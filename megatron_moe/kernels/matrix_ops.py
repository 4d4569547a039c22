"""Ops of update rules for whole matrices, a part of `kernels.ops.Kernels`."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_moe.precision.optimizer_state import PackedState


@dataclass(frozen=True, kw_only=True)
class MatrixStep:
    """Hyperparameters and device scalars of one step of a rule for whole matrices; see `kernels.ops.AdamWStep`."""

    lr: float
    weight_decay: float
    grad_scale: Tensor
    apply_update: Tensor
    nonfinite: Tensor


class MatrixOps(Protocol):
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
        ...

    def descend_(
        self, master: PackedState, direction: Tensor, factor: float, move: MatrixStep, weights: Tensor | None = None
    ) -> None:
        """Sets flat master weights (plain or remainder) to master * (1 - lr * weight_decay) - lr * factor * direction
        and, if given, `weights` to their rounded values."""
        ...

    def symmetric_product(self, x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
        """alpha * x x^T + beta * base of matrices x [n, M, K] and symmetric matrices `base` [n, M, M], accumulated in
        fp32 or wider and rounded to the dtype of x. x may have any strides."""
        ...
