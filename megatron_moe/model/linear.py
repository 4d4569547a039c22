"""A matrix with an optional bias, whose weight gradient goes where its parameter says."""

from typing import Literal

from torch import Tensor, nn

from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.specs.params import ParamMeta


class Linear(nn.Module):
    """y = x W^T + b with W [outputs, inputs].

    `tp_dim` says which dim of W tensor parallelism cuts: 0 for a matrix that makes heads or ffn channels, 1 for one
    that takes them, None for neither. `init` is "output" for a matrix that writes to the residual stream.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        bias: bool = False,
        tp_dim: Literal[0, 1] | None = None,
        splits: tuple[int, ...] = (),
        init: Literal["normal", "output"] = "normal",
    ) -> None:
        super().__init__()
        self.kernels = kernels
        weight_meta = ParamMeta(role="matrix", init=init, fan_in=inputs, tp_dim=tp_dim, splits=splits)
        self.weight = new_parameter((outputs, inputs), weight_meta, ctx)
        self.bias = None
        if bias:
            cut = 0 if tp_dim == 0 else None
            bias_meta = ParamMeta(role="bias", init="zeros", tp_dim=cut, splits=splits, decay=False)
            self.bias = new_parameter((outputs,), bias_meta, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        return autograd.linear(self.kernels, x, self.weight, self.bias)
