"""Reference implementation of the optimizer ops that work on whole matrices, as Muon needs them."""

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype, mark_nonfinite
from megatron_moe.kernels.update_ops import MatrixStep
from megatron_moe.precision.optimizer_state import PackedState, pack, round_weights, unpack


def momentum_(
    grad: Tensor, momentum: Tensor, beta: float, move: MatrixStep, dtype: torch.dtype, *, nesterov: bool = False
) -> Tensor:
    wide = internal_dtype(momentum.dtype)
    grad = grad.to(wide) * move.grad_scale.to(wide)
    new = torch.lerp(grad, momentum.to(wide), beta)
    momentum.copy_(torch.where(move.apply_update, new.to(momentum.dtype), momentum))
    mark_nonfinite(move, momentum)
    return (torch.lerp(grad, new, beta) if nesterov else new).to(dtype)


def apply_direction_(
    master: PackedState, direction: Tensor, factor: float, move: MatrixStep, weights: Tensor | None = None
) -> None:
    old = unpack(master, weights)
    new = old * (1 - move.lr * move.weight_decay) - move.lr * factor * direction.to(old.dtype)
    new = torch.where(move.apply_update, new, old)
    rounded = None if weights is None else round_weights(new, weights.dtype)
    master.data.copy_(pack(new, master, rounded).data)
    mark_nonfinite(move, new)
    if weights is not None and rounded is not None:
        weights.copy_(rounded)
        mark_nonfinite(move, weights)


def syrk(x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    if base is None:
        return x @ x.mT if alpha == 1 else alpha * (x @ x.mT)
    return torch.baddbmm(base, x, x.mT, beta=beta, alpha=alpha)
