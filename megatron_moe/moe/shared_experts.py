"""Shared experts: an MLP that processes every token (DeepSeekMoE, arXiv 2401.06066 section 3.2)."""

from typing import Any

from torch import Tensor, nn

from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.resources import ModelResources


class SharedExperts(nn.Module):
    """Computes fc2(act(fc1(x))). With `config.gate`, each token's output is multiplied by sigmoid(x w^T) (Qwen2-MoE).

    Several shared experts are one MLP with their total ffn size. Parameters: `linear_fc1.weight` [F, H], or [2F, H] for
    a gated activation (gate rows first); `linear_fc2.weight` [H, F]; and w = `gate_weight` [1, H] with `config.gate`.
    """

    def __init__(self, config: SharedExpertsConfig, resources: ModelResources[Any]) -> None:
        super().__init__()
        self.activation = config.mlp.activation
        self.kernels = resources.kernels
        declared = DeclaredParameters(config.parameters(resources.ctx.config), resources)
        self.linear_fc1 = declared.linear("linear_fc1", saves_input=True)  # the router saves the same input
        self.linear_fc2 = declared.linear("linear_fc2")
        self.gate_weight = declared.optional_parameter("gate_weight")

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the MLP's output [..., H] for hidden states [..., H]."""
        return self.run_fc2(self.run_fc1(hidden), hidden)

    def run_fc1(self, hidden: Tensor) -> Tensor:
        """First half of `forward`: returns fc1(hidden), [..., F], or [..., 2F] for a gated activation."""
        return self.linear_fc1(hidden)

    def run_fc2(self, ffn: Tensor, hidden: Tensor) -> Tensor:
        """Second half of `forward`: returns fc2(act(ffn)), [..., H], multiplied by the gate of `hidden` if
        configured."""
        out = self.linear_fc2.forward_of_activation(ffn, self.activation, self.linear_fc1)
        if self.gate_weight is None:
            return out
        logit = autograd.linear(self.kernels, hidden, self.gate_weight)
        gate = logit.to(internal_dtype(logit.dtype)).sigmoid()
        return (out * gate).to(out.dtype)
