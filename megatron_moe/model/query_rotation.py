"""Fused norm and rotary embedding of the queries of compressed attention, and inverse rotation and grouped projection
of its output. To save memory, their backwards read the queries and the output that attention saves anyway.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.compressed_attention import NORM_BLOCK_BYTES, CompressedAttentionConfig
from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.memory.output_discard import PackedTensor, unpack
from megatron_moe.parallel.autograd_function import AutogradFunction


@dataclass(frozen=True)
class QueryRotation:
    """RMSNorm per head and rotary embedding of queries, for the positions of one microbatch."""

    kernels: Kernels
    cos_SBD: Tensor
    sin_SBD: Tensor
    config: CompressedAttentionConfig

    @property
    def start(self) -> int:
        """Index of the first rotated channel of a head."""
        return self.config.head_dim - self.config.rope.dim

    def rotate(self, x_SBND: Tensor, *, back: bool = False) -> Tensor:
        """Applies the rotary embedding of the tokens' positions; with `back`, its inverse."""
        sin_SBD = -self.sin_SBD if back else self.sin_SBD
        return self.kernels.rope(x_SBND, self.cos_SBD, sin_SBD, self.config.rope.interleaved, self.start)

    def apply(self, x_SBND: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x / rms(x), rotated, and 1 / rms(x) [S, B, N, 1] in the internal dtype."""
        wide = internal_dtype(x_SBND.dtype)
        square = torch.linalg.vector_norm(x_SBND, dim=-1, keepdim=True, dtype=wide).square() / x_SBND.shape[-1]
        scale = torch.rsqrt(square + self.config.norm.eps)
        return self.rotate(torch.mul(x_SBND, scale, out=torch.empty_like(x_SBND))), scale


@dataclass
class SavedQueries:
    """Reference to the queries that attention saves; the backward of `normed_and_rotated` reads them instead of saving
    its own input."""

    packed: PackedTensor | None = None

    def pop(self) -> Tensor:
        """Returns the queries and drops the reference, so that backward can use them only once."""
        assert self.packed is not None
        output, self.packed = unpack(self.packed), None
        return output


def normed_and_rotated(x_SBND: Tensor, rotation: QueryRotation, saved: SavedQueries) -> Tensor:
    """Normalises and rotates queries: R(x / rms(x)). The caller must set `saved.packed` before backward, which reads
    the queries from it."""
    return _RotatedQueries.apply(x_SBND, rotation, saved)


def grouped_output(context_SBND: Tensor, weight: Tensor, rotation: QueryRotation, groups: int) -> Tensor:
    """Rotates the output of attention back, and multiplies each group of heads by its rows of `weight`: [S, B, C]."""
    return _GroupedOutput.apply(context_SBND, weight, rotation, groups)


class _RotatedQueries(AutogradFunction):
    """q = R(x / rms(x)) for a rotation R. With s = 1 / rms(x), the gradient of x is s R^-1(g - q mean(g q)), so that
    only q and s are saved, and q by attention anyway."""

    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, rotation: QueryRotation, saved: SavedQueries) -> Tensor:
        q_SBND, scale = rotation.apply(x_SBND)
        ctx.save_for_backward(scale)
        ctx.rotation, ctx.saved = rotation, saved
        return q_SBND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,), q_SBND, grad_SBND = ctx.saved_tensors, ctx.saved.pop(), grads[0]
        of_normed = torch.empty_like(q_SBND)
        step = max(NORM_BLOCK_BYTES // (q_SBND[0].numel() * scale.element_size()), 1)
        for start in range(0, len(q_SBND), step):
            rows = slice(start, start + step)
            q, grad = (x[rows].to(scale.dtype, copy=True) for x in (q_SBND, grad_SBND))
            mean = (grad * q).mean(dim=-1, keepdim=True)
            of_normed[rows] = grad.sub_(q.mul_(mean)).mul_(scale[rows])
        return ctx.rotation.rotate(of_normed, back=True), None, None


class _GroupedOutput(AutogradFunction):
    """Rotates the output of attention back, and multiplies each group of heads by its matrix. Backward rotates again
    instead of saving the result."""

    @staticmethod
    def forward(ctx: Any, context_SBND: Tensor, weight: Tensor, rotation: QueryRotation, groups: int) -> Tensor:
        ctx.save_for_backward(context_SBND, weight)
        ctx.rotation, ctx.groups = rotation, groups
        rows_GTK = _by_group(rotation.rotate(context_SBND, back=True), groups)
        out_GTR = torch.bmm(rows_GTK, weight.unflatten(0, (groups, -1)).mT)
        return out_GTR.transpose(0, 1).reshape(*context_SBND.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (context_SBND, weight), rotation, groups = ctx.saved_tensors, ctx.rotation, ctx.groups
        grad_GTR = _by_group(grads[0], groups)
        rows_GTK = _by_group(rotation.rotate(context_SBND, back=True), groups)
        of_weight = torch.bmm(grad_GTR.mT, rows_GTK).flatten(0, 1)
        del rows_GTK
        of_rows = torch.empty_like(context_SBND, memory_format=torch.contiguous_format)
        torch.bmm(grad_GTR, weight.unflatten(0, (groups, -1)), out=_by_group(of_rows, groups))
        return rotation.rotate(of_rows), of_weight, None, None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Reshapes [S, B, ...] to [groups, S B, channels per group]."""
    return x.flatten(2).flatten(0, 1).unflatten(-1, (groups, -1)).transpose(0, 1)
