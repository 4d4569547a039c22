"""A transformer layer: a mixer and a feed-forward module, each with a norm and a residual connection."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_moe.config.model import LayerConfig
from megatron_moe.config.registry import resolve
from megatron_moe.config.residual import AddedResidual
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.layers.components import Connection, FeedForward, Mixer, Site, SublayerInput, new_module
from megatron_moe.layers.linear import Linear, norm_copy_format
from megatron_moe.layers.node_chain import EMPTY_STATE, LayerState, Node, parameters_of, recompute_nodes, run_nodes
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.parallel import rng
from megatron_moe.parallel.tensor_parallel import sequence_part


class TransformerLayer(nn.Module):
    """Computes x = x + self_attention(norm(x)), then x = x + mlp(norm(x)), or another residual connection.

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
    connections: dict[str, Connection]
    """Residual connections of the mixer and of the feed-forward module, by module name."""

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
        connection, suffix = resolve(config.residual.module), config.residual.submodule
        self.connections = {name: connection(config.residual, config.hidden_size, resources) for name, *_ in modules}
        for name in self.connections if suffix else ():
            setattr(self, f"{name}_{suffix}", self.connections[name])
        self.nodes = tuple(self._chain())

    def _chain(self) -> Iterator[Node]:
        """Nodes of the mixer with the norm of the feed-forward module, then those of the feed-forward module."""
        config = self.config
        first = parameters_of(*(module for name, module in self.named_children() if name != "mlp"))
        if self.mlp is None:
            yield Node(config.mixer.node_name, "attention", self._mixer, first)
            return
        run = self._norm if self.self_attention is None else self._mixer_and_norm
        yield Node("mlp_norm" if self.self_attention is None else config.mixer.node_name, "attention", run, first)
        feed_forward = self.mlp.node_chain()
        if self.saved_tensors.is_recomputed(config.feed_forward.whole_module):
            feed_forward = (
                recompute_nodes(feed_forward, self.saved_tensors, "experts", inputs=("normed_SBH",), output="out_SBH"),
            )
        yield from feed_forward
        yield Node("residual", None, self._residual)

    @staticmethod
    def _new_norm(config: LayerConfig, resources: ModelResources, readers: Sequence[Linear]) -> Norm:
        """Creates a norm whose output is the input of the linear layers `readers`."""
        fmt = norm_copy_format(readers)
        return Norm(config.norm, config.hidden_size, resources.ctx, resources.kernels, copy_format=fmt)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the layer to the hidden states [S, B, H] of this rank; returns the same shape."""
        return run_nodes(self.nodes, EMPTY_STATE.evolve(hidden_SBH=hidden_SBH), mb).hidden_SBH

    def _mixed(self, stream: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Any, Tensor]:
        """Runs the mixer with its norm. Returns the residual stream, its weights, and the output to write to it."""
        assert self.self_attention is not None, "the layer has no mixer"
        with self.saved_tensors.offload_scope("attn_norm"):
            read = self.connections["self_attention"].sublayer_input(stream, self.input_layernorm)
        with read.discard:
            out_SBH = self._dropped(self.self_attention(read.normed_SBH, mb), "attention", mb)
        return read.stream, read.stream_weights, out_SBH

    def _mixer(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the mixer with its norm and residual connection."""
        written = self.connections["self_attention"].add_output(*self._mixed(state.hidden_SBH, mb))
        return state.evolve(hidden_SBH=written)

    def _norm(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the norm before the feed-forward module."""
        with self.saved_tensors.offload_scope("mlp_norm"):
            return _with_input(state, self.connections["mlp"].sublayer_input(state.hidden_SBH, self.pre_mlp_layernorm))

    def _mixer_and_norm(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Runs the mixer with its norm and residual connection, and the norm before the feed-forward module."""
        written = self._mixed(state.hidden_SBH, mb)
        with self.saved_tensors.offload_scope("mlp_norm"):
            return _with_input(state, self.connections["mlp"].add_output_and_read(*written, self.pre_mlp_layernorm))

    def _residual(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        """Writes the output of the feed-forward module to the residual stream."""
        out_SBH = self._dropped(state.out_SBH, "mlp", mb)
        stream = self.connections["mlp"].add_output(state.hidden_SBH, state.stream_weights, out_SBH)
        return EMPTY_STATE.evolve(hidden_SBH=stream, earlier=state.earlier)

    def _dropped(self, out_SBH: Tensor, part: str, mb: MicrobatchContext) -> Tensor:
        if not self.config.hidden_dropout:
            return out_SBH
        key = mb.key(f"{self.site}.{part}_residual")
        return rng.dropout(out_SBH, self.config.hidden_dropout, key, part=self.positions)


def _with_input(state: LayerState, read: SublayerInput) -> LayerState:
    stream, normed_SBH, discard, weights = read
    return state.evolve(hidden_SBH=stream, normed_SBH=normed_SBH, discard=discard, stream_weights=weights)


class AddedConnection(Connection):
    """Adds the output of the sublayer to its input. The sum is fused with the norm that follows it."""

    def __init__(self, config: AddedResidual, hidden_size: int, resources: ModelResources) -> None:
        self._from_norm = config.from_norm
        self._saved_tensors = resources.saved_tensors

    def sublayer_input(self, stream: Tensor, norm: Norm) -> SublayerInput:
        return self._read(norm, *norm(stream, keeps_input=True))

    def add_output(self, stream: Tensor, weights: Any, out_SBH: Tensor) -> Tensor:
        return stream + out_SBH

    def add_output_and_read(self, stream: Tensor, weights: Any, out_SBH: Tensor, norm: Norm) -> SublayerInput:
        return self._read(norm, *norm(out_SBH, stream))

    def _read(self, norm: Norm, hidden_SBH: Tensor, normed_SBH: Tensor) -> SublayerInput:
        discard = self._saved_tensors.discard_output("layernorm", norm.forward_unquantized, (hidden_SBH,), normed_SBH)
        return SublayerInput(normed_SBH if self._from_norm else hidden_SBH, normed_SBH, discard)
