"""Feed-forward module: a soft mixture of MLPs, all of which process every token, `--feed-forward soft_mixture`."""

from dataclasses import dataclass

import torch

from megatron_moe.config.component import FeedForwardConfig, ParamSpec, linear_parameters
from megatron_moe.config.costs import saved_tensor
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.registry import FEED_FORWARDS
from megatron_moe.layers.components import FeedForward
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.parallel.tensor_parallel import enter_tensor_parallel


@dataclass(frozen=True, kw_only=True)
class SoftMixtureConfig(FeedForwardConfig):
    """Sum of MLPs, each multiplied by its share of softmax(x W): one MLP of n * F channels whose blocks are scaled."""

    hidden_size: int
    ffn_hidden_size: int
    """Channels F of one MLP."""
    num_mlps: int = 2

    module = f"{__name__}:SoftMixture"
    registered_as = "soft_mixture"

    def as_flags(self):
        return {"ffn_hidden_size": self.num_mlps * self.ffn_hidden_size}

    @property
    def recompute_modules(self):
        return ("mlp",)

    def parameters(self, parallel):
        hidden, blocks = self.hidden_size, (self.ffn_hidden_size,) * self.num_mlps
        fields = {"counted": "dense_mlp", "low": "mlp", "recomputed_by": ("mlp",), "splits": blocks}
        yield from linear_parameters("linear_fc1", (sum(blocks), hidden), parallel, tp_dim=0, **fields)
        yield from linear_parameters("linear_fc2", (hidden, sum(blocks)), parallel, tp_dim=1, init="output", **fields)
        meta = ParamMeta(role="gate", fan_in=self.hidden_size, partial_over_tp=parallel.sequence_parallel)
        yield ParamSpec(name="gate", shape=(self.num_mlps, self.hidden_size), meta=meta, counted="dense_mlp")

    def saved_tensors(self, parallel, sizes):
        count, mark = sizes.inner * self.num_mlps * self.ffn_hidden_size // parallel.tp, {"recomputed_by": ("mlp",)}
        for name in ("fc1 output", "activation"):
            yield saved_tensor("mlp", name, "U nF", count, sizes.activation_itemsize, mark)
        yield saved_tensor("mlp", "scaled activation", "U nF", count, sizes.activation_itemsize, mark | {"low": "mlp"})
        yield saved_tensor("mlp", "shares", "U n", sizes.inner * self.num_mlps, sizes.activation_itemsize, mark)

    def backward_workspace(self, parallel, sizes, low):
        width = self.num_mlps * self.ffn_hidden_size // parallel.tp
        return (
            2.0 * sizes.inner * width * sizes.activation_itemsize
            + sizes.gathered_bytes_per_channel(parallel) * self.hidden_size
        )

    def layout_problem(self, parallel):
        if self.ffn_hidden_size % parallel.tp:
            return f"{parallel.tp} tensor-parallel ranks cannot share {self.ffn_hidden_size} channels equally"
        return None


class SoftMixture(FeedForward):
    def __init__(self, config, site, resources):
        super().__init__()
        self.num_mlps, self.ctx = config.num_mlps, resources.ctx
        declared = DeclaredParameters.of(config, resources)
        self.linear_fc1, self.linear_fc2 = declared.linear("linear_fc1"), declared.linear("linear_fc2")
        self.gate = declared.parameter("gate")

    def forward(self, hidden_SBH):
        # tp: sharded like a column-parallel layer, because every rank scales its own channels
        shares_SBN = enter_tensor_parallel((hidden_SBH @ self.gate.T).softmax(dim=-1), self.ctx)
        ffn_SBNF = torch.nn.functional.silu(self.linear_fc1(hidden_SBH)).unflatten(-1, (self.num_mlps, -1))
        return self.linear_fc2((ffn_SBNF * shares_SBN[..., None]).flatten(2))


def from_flags(flags):
    """Creates the config of every layer; its two MLPs together are as wide as an ungated MLP."""
    width = (flags.ffn_hidden_size or 4 * flags.hidden_size) // 2
    return [SoftMixtureConfig(hidden_size=flags.hidden_size, ffn_hidden_size=width)] * flags.num_layers


FEED_FORWARDS.register("soft_mixture", from_flags)
