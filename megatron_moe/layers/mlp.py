"""Dense feed-forward module."""

from torch import Tensor

from megatron_moe.config.mlp import MLPConfig
from megatron_moe.layers.components import FeedForward, Site
from megatron_moe.layers.linear import Linear
from megatron_moe.layers.resources import ModelResources


class MLP(FeedForward):
    """Dense MLP fc2(act(fc1(x))); a gated fc1 (arXiv 2002.05202) has the gate rows first, then the up rows."""

    def __init__(self, config: MLPConfig, site: Site, resources: ModelResources) -> None:
        super().__init__()
        ctx, kernels = resources.ctx, resources.kernels
        self.config = config
        (_, (ffn, hidden), first), (_, _, second) = config.matrices()
        saves_input = resources.saved_tensors.is_recomputed("layernorm")
        quantizers = (
            resources.quantizers.new("mlp", "linear_fc1", saves_input=saves_input),
            resources.quantizers.new("mlp", "linear_fc2"),
        )
        self.linear_fc1 = Linear(hidden, ffn, ctx, kernels, bias=config.bias, quantizer=quantizers[0], **first)
        self.linear_fc2 = Linear(
            config.ffn_hidden_size, hidden, ctx, kernels, bias=config.bias, quantizer=quantizers[1], **second
        )
        self.input_linears = (self.linear_fc1,)

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies fc1, activation and fc2 to x [..., H]; returns the same shape."""
        return self.linear_fc2.of_activation(self.linear_fc1(hidden), self.config.activation, self.linear_fc1)
