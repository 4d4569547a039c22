"""Linear layer, sharded over tensor-parallel ranks by columns, by rows, or not at all."""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from megatron_moe.kernels import autograd
from megatron_moe.kernels.autograd import ShardedInput
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.param_meta import ParamMeta
from megatron_moe.parallel.parameter import Parameter, new_parameter
from megatron_moe.parallel.tensor_parallel import enter_tensor_parallel, leave_tensor_parallel, rejoin


class Linear(nn.Module):
    """y = x W^T + b with W [outputs, inputs].

    `tp_dim` is the dim of W that tensor parallelism shards (Megatron-LM, arXiv 1909.08053 section 3):

    0     column parallel: a rank has a shard of the outputs (heads, ffn channels). x is the residual stream; y is
          sharded along its last dim.
    1     row parallel: a rank has a shard of the inputs. x is sharded along its last dim; y, summed over the ranks, is
          the residual stream, and the bias is added once, after the sum.
    None  replicated. Under sequence parallelism every rank multiplies its own positions.

    The residual stream has all positions on every rank, or under sequence parallelism (arXiv 2205.05198 section 4.2.2)
    the rank's own positions. `splits`: see `ParamMeta`; `init` is "output" for a matrix that writes to the residual
    stream.
    """

    bias: Parameter | None

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
        self.ctx = ctx
        self.kernels = kernels
        self.tp_dim = tp_dim
        sequence_parallel = ctx.config.sequence_parallel
        weight_meta = ParamMeta(
            role="matrix",
            init=init,
            fan_in=inputs,
            tp_dim=tp_dim,
            splits=splits,
            partial_over_tp=sequence_parallel and tp_dim is None,
        )
        self.weight = new_parameter((outputs, inputs), weight_meta, ctx)
        self.bias = None
        if bias:
            cut = 0 if tp_dim == 0 else None
            bias_meta = ParamMeta(
                role="bias",
                init="zeros",
                tp_dim=cut,
                splits=splits,
                decay=False,
                partial_over_tp=sequence_parallel and cut is None,
            )
            self.bias = new_parameter((outputs,), bias_meta, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]; dim 0 is S, and a sharded dim has this rank's shard."""
        if self.tp_dim == 0:
            return column_product(x, self.weight, self.bias, self.ctx, self.kernels)
        if self.tp_dim is None or self.ctx.group("tp").size == 1:
            return autograd.linear(self.kernels, x, self.weight, self.bias)
        out = leave_tensor_parallel(autograd.linear(self.kernels, x, self.weight), self.ctx)
        return out if self.bias is None else out + self.bias


def column_product(
    hidden_SBH: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext, kernels: Kernels
) -> Tensor:
    """The residual stream times a weight [O / tp, H] with some of the outputs -> [S, B, O / tp], all positions.

    Sequence parallelism: backward gathers the input again instead of saving it gathered. tp: one more all-gather of
    S * B * H elements, for tp times less memory.
    """
    sharded = None
    if ctx.config.sequence_parallel:
        sharded = ShardedInput(hidden_SBH, partial(rejoin, group=ctx.group("tp")))
    return autograd.linear(kernels, enter_tensor_parallel(hidden_SBH, ctx), weight, bias, sharded=sharded)
