"""Dense feed-forward module."""

from torch import Tensor

from megatron_moe.config.mlp import MLPConfig
from megatron_moe.layers.components import FeedForward, Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.resources import ModelResources


class MLP(FeedForward):
    """Dense MLP fc2(act(fc1(x))); a gated fc1 (arXiv 2002.05202) has the gate rows first, then the up rows."""

    def __init__(self, config: MLPConfig, site: Site, resources: ModelResources) -> None:
        super().__init__()
        self.config = config
        declared = DeclaredParameters.of(config, resources)
        saves_input = resources.saved_tensors.is_recomputed("layernorm")
        self.linear_fc1 = declared.linear("linear_fc1", saves_input=saves_input)
        self.linear_fc2 = declared.linear("linear_fc2")
        self.input_linears = (self.linear_fc1,)

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies fc1, activation and fc2 to x [..., H]; returns the same shape."""
        return self.linear_fc2.forward_of_activation(self.linear_fc1(hidden), self.config.activation, self.linear_fc1)
