"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) over the last dim."""

from torch import Tensor, nn

from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.specs.attention import NormSpec
from megatron_moe.specs.params import ParamMeta


class Norm(nn.Module):
    """RMSNorm has a weight, LayerNorm a weight and a bias. A zero-centred weight is stored as gamma - 1."""

    def __init__(
        self, spec: NormSpec, width: int, ctx: ParallelContext, kernels: Kernels, *, over_heads: bool = False
    ) -> None:
        """`over_heads`: it norms the heads of this rank; otherwise the residual stream, or a latent of it."""
        super().__init__()
        partial = ctx.group("tp").size > 1 if over_heads else ctx.spec.sequence_parallel
        self.spec = spec
        self.kernels = kernels
        weight = ParamMeta(
            role="norm", init="zeros" if spec.zero_centered else "ones", decay=False, partial_over_tp=partial
        )
        self.weight = new_parameter((width,), weight, ctx)
        self.bias = None
        if spec.kind == "LayerNorm":
            bias = ParamMeta(role="bias", init="zeros", decay=False, partial_over_tp=partial)
            self.bias = new_parameter((width,), bias, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], computed in promote(fp32, dtype)."""
        if self.bias is None:
            return self.kernels.rms_norm(x, self.weight, self.spec.eps, self.spec.zero_centered)
        return self.kernels.layer_norm(x, self.weight, self.bias, self.spec.eps, self.spec.zero_centered)

    def of_sum(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + x, the norm of that), in one pass where there is a kernel for it"""
        if self.bias is None:
            return self.kernels.add_rms_norm(residual, x, self.weight, self.spec.eps, self.spec.zero_centered)
        total = residual + x
        return total, self(total)


class UnitNorm(nn.Module):
    """RMSNorm without a weight: Megatron's L2 norm of queries and keys (Llama 4)."""

    def __init__(self, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], computed in promote(fp32, dtype)."""
        return self.kernels.rms_norm(x, x.new_ones(x.shape[-1]), self.eps, False)
