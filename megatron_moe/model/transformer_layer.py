"""A transformer layer: a mixer and a feed-forward module, each with a norm and a residual connection."""

from collections.abc import Iterator, Sequence

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

    `self_attention` is the module of `config.mixer`, and `mlp` that of `config.feed_forward`; one of them may be absent
    (None), with its norm and its sum. `nodes` contains the steps of this computation: the mixer, then the nodes of the
    feed-forward module, then residual. `forward` runs them in order.

    Args:
        layer: global layer index, under which modules report metrics.
        site: path of the module in the model, used in the dropout keys of both residual connections.
    """

    nodes: tuple[Node, ...]
    """Node chain of the layer. `GPT.capture` replaces some nodes by nodes that replay CUDA graphs."""
    self_attention: Mixer | None
    mlp: FeedForward | None
    input_layernorm: Norm
    pre_mlp_layernorm: Norm

    def __init__(self, config: LayerConfig, layer: int, site: str, resources: ModelResources) -> None:
        super().__init__()
        ctx, saved_tensors = resources.ctx, resources.saved_tensors
        self.config = config
        self.site = site
        self.saved_tensors = saved_tensors
        self.positions = sequence_part(ctx)
        self.self_attention = self.mlp = None
        modules = [
            (name, norm, new_module(component, Site(f"{site}.{name}", layer), resources))
            for name, norm, component in config.sublayers
        ]
        for name, norm, module in modules:
            setattr(self, norm, self._new_norm(config, resources, module.input_linears))
            setattr(self, name, module)
        self.nodes = tuple(self._chain())

    def _chain(self) -> Iterator[Node]:
        """Nodes of the mixer with the norm of the feed-forward module, then those of the feed-forward module."""
        config = self.config
        first = parameters_of(*(module for name, module in self.named_children() if name != "mlp"))
        if self.mlp is None:
            yield Node(config.mixer.node, "attention", self._mixer, first)
            return
        run = self._norm if self.self_attention is None else self._mixer_and_norm
        yield Node("mlp_norm" if self.self_attention is None else config.mixer.node, "attention", run, first)
        feed_forward = self.mlp.node_chain()
        if self.saved_tensors.is_recomputed(config.feed_forward.whole_module):
            feed_forward = (
                recompute_nodes(feed_forward, self.saved_tensors, "experts", inputs=("normed_SBH",), output="out_SBH"),
            )
        yield from feed_forward
        yield Node("residual", None, self._residual)

    @staticmethod
    def _new_norm(config: LayerConfig, resources: ModelResources, readers: Sequence[Linear]) -> Norm:
        """Creates the norm whose result the linear layers `readers` multiply."""
        fmt = copy_format(readers)
        return Norm(config.norm, config.hidden_size, resources.ctx, resources.kernels, copy_format=fmt)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the layer to the hidden states [S, B, H] of this rank; returns the same shape."""
        return run_nodes(self.nodes, EMPTY_STATE.evolve(hidden_SBH=hidden_SBH), mb).hidden_SBH

    def _mixed(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Tensor]:
        """Runs the mixer with its norm. Returns its output and the tensor to which it is added."""
        assert self.self_attention is not None, "the layer has no mixer"
        with self.saved_tensors.offload_scope("attn_norm"):
            hidden_SBH, normed_SBH = self.input_layernorm(hidden_SBH, keeps_input=True)
            recompute = self.input_layernorm.unquantized
            discard = self.saved_tensors.discard_output("layernorm", recompute, (hidden_SBH,), normed_SBH)
        with discard:
            out_SBH = self._dropped(self.self_attention(normed_SBH, mb), "attention", mb)
        return out_SBH, self._residual_of(hidden_SBH, normed_SBH)

    def _mixer(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the mixer with its norm and residual connection."""
        out_SBH, residual_SBH = self._mixed(state.hidden_SBH, mb)
        return state.evolve(hidden_SBH=residual_SBH + out_SBH)

    def _norm(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the norm before the feed-forward module."""
        with self.saved_tensors.offload_scope("mlp_norm"):
            return self._normed(state, state.hidden_SBH, self.pre_mlp_layernorm(state.hidden_SBH))

    def _mixer_and_norm(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the mixer with its norm and residual connection, and the norm before the feed-forward module."""
        out_SBH, residual_SBH = self._mixed(state.hidden_SBH, mb)
        with self.saved_tensors.offload_scope("mlp_norm"):
            return self._normed(state, *self.pre_mlp_layernorm(out_SBH, residual_SBH))

    def _normed(self, state: LayerState, hidden_SBH: Tensor, normed_SBH: Tensor) -> LayerState:
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
