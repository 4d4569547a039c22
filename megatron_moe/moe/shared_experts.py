"""Shared experts: an MLP that processes every token (DeepSeekMoE, arXiv 2401.06066 section 3.2)."""

from torch import Tensor, nn

from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.layers.linear import Linear
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, new_parameter
from megatron_moe.precision.quantizer_factory import NO_QUANTIZERS, LinearQuantizers


class SharedExperts(nn.Module):
    """Computes fc2(act(fc1(x))). With `config.gate`, each token's output is multiplied by sigmoid(x w^T) (Qwen2-MoE).

    Several shared experts are one MLP with their total ffn size. Parameters: `linear_fc1.weight` [F, H], or [2F, H] for
    a gated activation (gate rows first); `linear_fc2.weight` [H, F]; and w = `gate_weight` [1, H] with `config.gate`.
    """

    gate_weight: Parameter | None

    def __init__(
        self,
        config: SharedExpertsConfig,
        ctx: ParallelContext,
        kernels: Kernels,
        quantizers: LinearQuantizers = NO_QUANTIZERS,
    ) -> None:
        super().__init__()
        assert not config.mlp.bias, "shared experts have no biases"
        self.activation = config.mlp.activation
        self.kernels = kernels
        hidden, ffn, fan = config.mlp.hidden_size, config.mlp.ffn_hidden_size, config.mlp.activation.fan
        first = quantizers.new("shared_experts", "linear_fc1", saves_input=True)  # the router saves the same input
        second = quantizers.new("shared_experts", "linear_fc2")
        self.linear_fc1 = Linear(hidden, fan * ffn, ctx, kernels, tp_dim=0, splits=(ffn,) * fan, quantizer=first)
        self.linear_fc2 = Linear(ffn, hidden, ctx, kernels, tp_dim=1, init="output", quantizer=second)
        self.gate_weight = None
        if config.gate:
            meta = ParamMeta(role="gate", fan_in=hidden, partial_over_tp=ctx.config.sequence_parallel)
            self.gate_weight = new_parameter((1, hidden), meta, ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the MLP's output [..., H] for hidden states [..., H]."""
        return self.second_half(self.first_half(hidden), hidden)

    def first_half(self, hidden: Tensor) -> Tensor:
        """First half of `forward`: returns fc1(hidden), [..., F], or [..., 2F] for a gated activation."""
        out: Tensor = self.linear_fc1(hidden)
        return out

    def second_half(self, ffn: Tensor, hidden: Tensor) -> Tensor:
        """Second half of `forward`: returns fc2(act(ffn)), [..., H], multiplied by the gate of `hidden` if
        configured."""
        out = self.linear_fc2.of_activation(ffn, self.activation, self.linear_fc1)
        if self.gate_weight is None:
            return out
        logit = autograd.linear(self.kernels, hidden, self.gate_weight)
        gate = logit.to(internal_dtype(logit.dtype)).sigmoid()
        return (out * gate).to(out.dtype)
