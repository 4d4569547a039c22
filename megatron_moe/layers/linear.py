"""Linear layer, sharded over tensor-parallel ranks by columns, by rows, or not at all."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels import autograd
from megatron_moe.kernels.autograd import ShardedInput
from megatron_moe.kernels.ops import Kernels
from megatron_moe.layers.quantized_module import QuantizedModule
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.sequence_shards import LayerCollectives, layer_collectives
from megatron_moe.parallel.tensor_parallel import enter_tensor_parallel, gather_shard, leave_tensor_parallel
from megatron_moe.precision.carried_copies import QuantizedActivation, carried_copy
from megatron_moe.precision.linear_quantizer import LinearQuantizer


class Linear(QuantizedModule):
    """Linear layer y = x W^T + b with W [outputs, inputs].

    `weight.meta.tp_dim` is the dim that tensor parallelism shards (Megatron-LM, arXiv 1909.08053 section 3):

    - 0 (column parallel): outputs (heads, ffn channels) are sharded. x is the residual stream, and y is
      sharded along its last dim.
    - 1 (row parallel): inputs are sharded. x is sharded along its last dim, and y is the residual stream,
      summed over the ranks. The bias is added once, after the sum.
    - None: W is replicated. With sequence parallelism, each rank multiplies only its own positions.

    In all cases the residual stream on a rank contains all positions or, with sequence parallelism (arXiv 2205.05198
    section 4.2.2), only the rank's own positions.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        quantizer: LinearQuantizer | None = None,
        collectives: LayerCollectives | None = None,
    ) -> None:
        """`collectives`: those of sequence parallelism; None selects torch.distributed's."""
        super().__init__()
        self.ctx = ctx
        self.collectives = collectives or layer_collectives(ctx)
        self.kernels = kernels
        self.tp_dim = weight.meta.tp_dim
        self._set_weight(weight, quantizer)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [S, ..., inputs] to y [S, ..., outputs]. A sharded dim contains only this rank's shard."""
        if self.tp_dim == 0:
            arguments = (self.ctx, self.kernels, self.quantizer, self.collectives)
            return column_parallel_linear(x, self.weight, self.bias, *arguments)
        if self.tp_dim is None or self.ctx.group("tp").size == 1:
            return autograd.linear(self.kernels, x, self.weight, self.bias, quantizer=self.quantizer)
        if self.quantizer is None and self.collectives.overlaps:
            out = autograd.linear_to_shard(self.kernels, x, self.weight, self.collectives)
        else:
            partial_SBO = autograd.linear(self.kernels, x, self.weight, quantizer=self.quantizer)
            out = leave_tensor_parallel(partial_SBO, self.ctx)
        return out if self.bias is None else out + self.bias

    def forward_of_activation(self, x: Tensor, activation: ActivationConfig, producer: "Linear") -> Tensor:
        """Applies the layer to activation(x), for `tp_dim` = 1. If possible, the activation quantises its result and is
        recomputed in backward. `producer`: layer whose output is x."""
        quantizer = self.quantizer
        if quantizer is None or self.bias is not None or not quantizer.can_fuse_activation(activation, self.weight):
            return self.forward(self.kernels.activation(x, None, activation))
        arguments = (self.kernels, x, self.weight, activation, quantizer, producer.quantizer)
        return leave_tensor_parallel(autograd.activation_linear(*arguments), self.ctx)


def norm_copy_format(linears: Sequence[Linear]) -> OperandFormat | None:
    """FP8 format in which a norm can write the rowwise copy of its output that the linear layers `linears` read. None
    if no layer reads one. Also None if a layer saves a columnwise copy, because one cast that makes both copies has no
    more memory traffic than a norm that makes one copy and a cast that makes the other."""
    # with tensor parallelism, sharded layers do not read the norm's output itself, so they would not get its copy
    whole = [linear for linear in linears if linear.tp_dim is None or linear.ctx.group("tp").size == 1]
    low = [linear.quantizer for linear in whole if linear.quantizer is not None and linear.quantizer.fused_block]
    return low[0].formats[0] if low and all(quantizer.save_input for quantizer in low) else None


def with_shared_fp8_copy(x: Tensor, *linears: Linear) -> Tensor:
    """Adds to `x` the FP8 copy that all of these linear layers read; returns `x` itself if they read separate
    copies."""
    quantizers = [linear.quantizer for linear in linears]
    first = quantizers[0]
    for linear, quantizer in zip(linears, quantizers, strict=True):
        gathers = linear.tp_dim == 0 and linear.ctx.group("tp").size > 1
        if gathers or first is None or not first.fused_block or quantizer is None:
            return x
        if quantizer.formats[0] != first.formats[0]:
            return x
    assert first is not None
    columnwise = torch.is_grad_enabled() and not all(each is not None and each.save_input for each in quantizers)
    if carried_copy(x, first.formats[0], columnwise=columnwise) is not None:
        return x
    x_q = first.quantize_input(x.detach().flatten(0, -2), columnwise=columnwise)
    return QuantizedActivation.of(x, x_q, first.formats[0])


def column_parallel_linear(
    hidden_SBH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ctx: ParallelContext,
    kernels: Kernels,
    quantizer: LinearQuantizer | None = None,
    collectives: LayerCollectives | None = None,
) -> Tensor:
    """Multiplies the residual stream by a column-parallel weight [O / tp, H]; returns all positions, [S, B, O / tp].
    `quantizer`: that of the layer, None without FP8 and FP4.

    Under sequence parallelism the input [S / tp, B, H] is gathered over tp, but saved as a shard and gathered again in
    backward. The saved input is then tp times smaller, at the cost of one more all-gather of S * B * H elements.
    """
    if ctx.config.sequence_parallel and quantizer is None:
        return autograd.linears_of_shard(kernels, hidden_SBH, collectives or layer_collectives(ctx), (weight, bias))[0]
    sharded = _sharded(hidden_SBH, ctx) if ctx.config.sequence_parallel else None
    whole_SBH = enter_tensor_parallel(hidden_SBH, ctx)
    return autograd.linear(kernels, whole_SBH, weight, bias, sharded=sharded, quantizer=quantizer)


def gathered_linears(hidden_SBH: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """Applies several linear layers to all positions of a sequence-parallel residual stream, which is gathered once for
    all of them. The weight gradients of a replicated layer must be partial sums over tp, as those of sequence
    parallelism are."""
    ctx, kernels = linears[0].ctx, linears[0].kernels
    if all(linear.quantizer is None for linear in linears):
        layers = [(linear.weight, linear.bias) for linear in linears]
        return autograd.linears_of_shard(kernels, hidden_SBH, linears[0].collectives, *layers)
    sharded, whole_SBH = _sharded(hidden_SBH, ctx), enter_tensor_parallel(hidden_SBH, ctx)
    each = ((linear.weight, linear.bias, linear.quantizer) for linear in linears)
    return [autograd.linear(kernels, whole_SBH, w, b, sharded=sharded, quantizer=q) for w, b, q in each]


def _sharded(hidden_SBH: Tensor, ctx: ParallelContext) -> ShardedInput:
    return ShardedInput(hidden_SBH, partial(gather_shard, group=ctx.group("tp")))
