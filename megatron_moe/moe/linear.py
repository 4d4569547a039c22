"""A matrix of the MoE layer that is no expert: latent projections and the matrices of shared experts."""

from typing import Literal

from torch import Tensor, nn

from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.specs.params import ParamMeta


class Linear(nn.Module):
    """y = x W^T with W [outputs, inputs], on the attention grid.

    `tp_dim` is the dim of W that tensor parallelism cuts, in `splits` parts one by one; None: replicated.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        init: Literal["normal", "output"] = "normal",
        tp_dim: Literal[0, 1] | None = None,
        splits: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.kernels = kernels
        meta = ParamMeta(role="matrix", init=init, fan_in=inputs, tp_dim=tp_dim, splits=splits)
        self.weight = new_parameter((outputs, inputs), meta, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        return autograd.linear(self.kernels, x, self.weight)
