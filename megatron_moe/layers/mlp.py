"""Dense feed-forward module."""

from torch import Tensor, nn

from megatron_moe.config.mlp import MLPConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.layers.linear import Linear
from megatron_moe.parallel.context import ParallelContext


class MLP(nn.Module):
    """Dense MLP fc2(act(fc1(x))); a gated fc1 (arXiv 2002.05202) has the gate rows first, then the up rows."""

    def __init__(self, config: MLPConfig, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        hidden, ffn, fan = config.hidden_size, config.ffn_hidden_size, config.activation.fan
        self.linear_fc1 = Linear(hidden, fan * ffn, ctx, kernels, bias=config.bias, tp_dim=0, splits=(ffn,) * fan)
        self.linear_fc2 = Linear(ffn, hidden, ctx, kernels, bias=config.bias, tp_dim=1, init="output")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self.linear_fc2.of_activation(self.linear_fc1(hidden), self.config.activation, self.linear_fc1)
