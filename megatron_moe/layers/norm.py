"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) over the last dim."""

from typing import cast

from torch import Tensor, nn

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.precision.carried_copies import QuantizedActivation


class Norm(nn.Module):
    """RMSNorm (with weight) or LayerNorm (with weight and bias). A zero-centred weight is stored as gamma - 1."""

    def __init__(
        self,
        config: NormConfig,
        width: int,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        over_heads: bool = False,
        copy_format: OperandFormat | None = None,
    ) -> None:
        """`over_heads`: True if the input is q or k of this rank's heads, False for the residual stream or a latent.
        `copy_format`: FP8 format in which the linear layers that read the result quantise it; None if they do not, or
        they need more than a rowwise copy. The kernel of RMSNorm, if there is one, then writes this copy too."""
        super().__init__()
        self.config = config
        self.kernels = kernels
        weight, *bias = config.parameters("norm", width, ctx.config, over_heads=over_heads)
        self.weight = new_parameter(weight.shape, weight.meta, ctx)
        self.bias = new_parameter(bias[0].shape, bias[0].meta, ctx) if bias else None
        self.copy_format = copy_format if kernels.fuses_norms and self.bias is None else None

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, keeps_input: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns norm(x) [..., width], a `QuantizedActivation` with `copy_format`. With `residual`, returns
        (total, norm(total)), where total = residual + x; with `keeps_input`, (x, norm(x)), whose gradients a kernel can
        add. Computes in promote(fp32, dtype)."""
        if self.copy_format is None:
            if keeps_input and self.bias is None:
                return self.kernels.add_rms_norm(None, x, self.weight, self.config.eps, self.config.zero_centered)
            normed = self.forward_unquantized(x, residual)
            return (x, cast(Tensor, normed)) if keeps_input else normed
        options = (self.config.eps, self.config.zero_centered, self.copy_format)
        total, normed, normed_q = self.kernels.rms_norm_quantized(x, residual, self.weight, *options)
        normed = QuantizedActivation.of(normed, normed_q, self.copy_format)
        return (total, normed) if keeps_input or residual is not None else normed

    def forward_unquantized(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Does the same as `forward`, but the output carries no quantised copy."""
        eps, zero_centered = self.config.eps, self.config.zero_centered
        if self.bias is None and residual is not None:
            return self.kernels.add_rms_norm(residual, x, self.weight, eps, zero_centered)
        total = x if residual is None else residual + x
        if self.bias is None:
            normed = self.kernels.rms_norm(total, self.weight, eps, zero_centered)
        else:
            normed = self.kernels.layer_norm(total, self.weight, self.bias, eps, zero_centered)
        return normed if residual is None else (total, normed)


class UnitNorm(nn.Module):
    """RMSNorm without weight: Megatron's L2 norm of queries and keys (Llama 4)."""

    def __init__(self, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [..., width], computed in promote(fp32, dtype)."""
        return self.kernels.rms_norm(x, x.new_ones(x.shape[-1]), self.eps, False)
