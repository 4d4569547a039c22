"""A transformer layer: a mixer and a feed-forward module, each with a norm and a residual connection."""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron_moe.config.model import LayerConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.layers.components import FeedForward, Mixer, Site, new_module
from megatron_moe.layers.linear import Linear, copy_format
from megatron_moe.layers.node_chain import EMPTY_STATE, LayerState, Node, parameters_of, recompute_nodes, run_nodes
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.parallel import rng
from megatron_moe.parallel.tensor_parallel import sequence_part


class TransformerLayer(nn.Module):
    """Computes x = x + self_attention(norm(x)), then x = x + mlp(norm(x)).

    `self_attention` is the module of `config.mixer`, and `mlp` that of `config.feed_forward`. `nodes` contains the
    steps of this computation: attention, then the nodes of the feed-forward module, then residual. `forward` runs them
    in order.

    Args:
        layer: global layer index, under which modules report metrics.
        site: path of the module in the model, used in the dropout keys of both residual connections.
    """

    nodes: tuple[Node, ...]
    """Node chain of the layer. `GPT.capture` replaces some nodes by nodes that replay CUDA graphs."""

    def __init__(self, config: LayerConfig, layer: int, site: str, resources: ModelResources) -> None:
        super().__init__()
        ctx, saved_tensors = resources.ctx, resources.saved_tensors
        self.config = config
        self.site = site
        self.saved_tensors = saved_tensors
        self.positions = sequence_part(ctx)
        mixer: Mixer = new_module(config.mixer, Site(f"{site}.self_attention", layer), resources)
        mlp: FeedForward = new_module(config.feed_forward, Site(f"{site}.mlp", layer), resources)
        self.input_layernorm = self._new_norm(config, resources, mixer.input_linears)
        self.self_attention = mixer
        self.pre_mlp_layernorm = self._new_norm(config, resources, mlp.input_linears)
        self.mlp = mlp
        feed_forward = mlp.node_chain()
        if saved_tensors.is_recomputed(config.feed_forward.whole_module):
            feed_forward = (
                recompute_nodes(feed_forward, saved_tensors, "experts", inputs=("normed_SBH",), output="out_SBH"),
            )
        attention = parameters_of(self.input_layernorm, self.self_attention, self.pre_mlp_layernorm)
        self.nodes = (
            Node("attention", "attention", self._attention, attention),
            *feed_forward,
            Node("residual", None, self._residual),
        )

    @staticmethod
    def _new_norm(config: LayerConfig, resources: ModelResources, readers: Sequence[Linear]) -> Norm:
        """Norm whose result `readers` multiply."""
        fmt = copy_format(readers)
        return Norm(config.norm, config.hidden_size, resources.ctx, resources.kernels, copy_format=fmt)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the layer to the hidden states [S, B, H] of this rank; returns the same shape."""
        return run_nodes(self.nodes, EMPTY_STATE.evolve(hidden_SBH=hidden_SBH), mb).hidden_SBH

    def _attention(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs attention with its norm and residual connection, and the norm before the feed-forward module."""
        hidden_SBH = state.hidden_SBH
        with self.saved_tensors.offload_scope("attn_norm"):
            normed_SBH = self.input_layernorm(hidden_SBH)
            recompute = self.input_layernorm.unquantized
            discard = self.saved_tensors.discard_output("layernorm", recompute, (hidden_SBH,), normed_SBH)
        with discard:
            out_SBH = self._dropped(self.self_attention(normed_SBH, mb), "attention", mb)
        with self.saved_tensors.offload_scope("mlp_norm"):
            hidden_SBH, normed_SBH = self.pre_mlp_layernorm(out_SBH, self._residual_of(hidden_SBH, normed_SBH))
            recompute = self.pre_mlp_layernorm.unquantized
            discard = self.saved_tensors.discard_output("layernorm", recompute, (hidden_SBH,), normed_SBH)
        hidden_SBH = self._residual_of(hidden_SBH, normed_SBH)
        return state.evolve(hidden_SBH=hidden_SBH, normed_SBH=normed_SBH, discard=discard)

    def _residual(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Adds the output of the feed-forward module to the residual stream."""
        hidden_SBH = state.hidden_SBH + self._dropped(state.out_SBH, "mlp", mb)
        return EMPTY_STATE.evolve(hidden_SBH=hidden_SBH, earlier=state.earlier)

    def _residual_of(self, hidden_SBH: Tensor, normed_SBH: Tensor) -> Tensor:
        """Tensor to which a module's output is added: `normed_SBH` with `residual_from_norm`, else `hidden_SBH`."""
        return normed_SBH if self.config.residual_from_norm else hidden_SBH

    def _dropped(self, out_SBH: Tensor, part: str, mb: MicrobatchContext) -> Tensor:
        if not self.config.hidden_dropout:
            return out_SBH
        key = mb.key(f"{self.site}.{part}_residual")
        return rng.dropout(out_SBH, self.config.hidden_dropout, key, part=self.positions)
