"""Builds differentiable permute and unpermute ops from the gather and scatter-add kernels of a backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.reference import routing as reference
from megatron_moe.parallel.autograd_function import AutogradFunction


@dataclass(frozen=True)
class PermuteKernels:
    """A backend's gather and scatter-add kernels. Both require a `RowIndex` whose `rows_TK` is not None."""

    gather: Callable[[Tensor, RowIndex], Tensor]
    """Gathers tokens [T, H] to rows [R, H]; padding rows are 0."""
    scatter_add: Callable[[Tensor, RowIndex], Tensor]
    """Sums the rows [R, H] of each token in the internal dtype -> [T, H]."""

    def permute(self, tokens_TH: Tensor, index: RowIndex) -> Tensor:
        """See `Kernels.permute`. Plain torch is used if `index.rows_TK` is None."""
        if index.rows_TK is None:
            return reference.permute(tokens_TH, index)
        return _Permute.apply(tokens_TH, index, self)

    def unpermute(self, rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
        """See `Kernels.unpermute`. Plain torch is used if `index.rows_TK` is None."""
        if index.rows_TK is None:
            return reference.unpermute(rows_RH, index, num_tokens)
        return _Unpermute.apply(rows_RH, index, self)


class _Permute(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, index: RowIndex, kernels: PermuteKernels) -> Tensor:
        ctx.index, ctx.kernels = index, kernels
        return kernels.gather(tokens_TH, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.scatter_add(grads[0], ctx.index), None, None


class _Unpermute(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, index: RowIndex, kernels: PermuteKernels) -> Tensor:
        ctx.index, ctx.kernels = index, kernels
        return kernels.scatter_add(rows_RH, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.gather(grads[0], ctx.index), None, None
