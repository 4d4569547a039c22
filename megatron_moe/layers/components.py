"""Base classes of mixers, feed-forward modules and residual connections, and functions that construct modules from
their configs (`config/component.py`, `config/residual.py`)."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_moe.config.component import Component
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.registry import resolve
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.layers.linear import Linear
from megatron_moe.layers.node_chain import LayerState, Node, parameters_of
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import DiscardScope


class Site(NamedTuple):
    """Position of a module in the model."""

    path: str
    """Path in the module tree, used in RNG keys: "decoder.layers.7.self_attention"."""
    layer: int
    """Global layer index, under which the module reports metrics. Those of MTP layers follow those of the decoder."""


class Mixer(nn.Module):
    """Base class of mixers, which are constructed as `Class(config, site, resources)`.

    `forward(hidden_SBH, mb)` maps the normed residual stream to the mixer's output, both [S, B, H]. With sequence
    parallelism, S contains this rank's positions only.
    """

    input_linears: tuple[Linear, ...] = ()
    """Linear layers that read the module's input, for which the preceding norm may write an FP8 copy."""

    def __init__(self, site: Site, resources: ModelResources) -> None:
        super().__init__()
        self.ctx, self.kernels, self.saved_tensors = resources.ctx, resources.kernels, resources.saved_tensors
        self.site, self.layer = site.path, site.layer


class FeedForward(nn.Module):
    """Base class of feed-forward modules, which are constructed as `Class(config, site, resources)`.

    `forward(hidden_SBH)` maps the normed residual stream to the module's output, both [S, B, H]. With sequence
    parallelism, S contains this rank's positions only.
    """

    input_linears: tuple[Linear, ...] = ()
    """See `Mixer.input_linears`."""
    dispatcher: Any = None
    """Token dispatcher of routed experts; None if there are none."""
    nodes: tuple[Node, ...] = ()
    """Node chain that computes `LayerState.out_SBH` from `normed_SBH`. Default: one node that calls `forward`."""

    def node_chain(self) -> tuple[Node, ...]:
        """Returns `nodes`, or one node that calls `forward` if there are none."""
        return self.nodes or (Node("mlp", "experts", self._run, parameters_of(self)),)

    def draw_logits(self, num_tokens: int, dtype: torch.dtype, mb: MicrobatchContext) -> Tensor | None:
        """Draws random logits that replace those of a router (`--moe-router-force-load-balancing`); None if they are
        not replaced."""
        return None

    def _run(self, state: LayerState, mb: MicrobatchContext) -> LayerState:
        with state.discard:
            return state.evolve(out_SBH=self(state.normed_SBH), normed_SBH=None)


class SublayerInput(NamedTuple):
    """Input of a sublayer, and the state that is needed to write its output to the residual stream."""

    stream: Tensor
    """Residual stream to which the output is written."""
    normed_SBH: Tensor
    """Input of the sublayer's module: the result of the norm."""
    discard: DiscardScope
    """Scope for operations that read `normed_SBH` (`LayerState.discard`)."""
    stream_weights: Any = None
    """Weights with which the output is written (`LayerState.stream_weights`)."""


class Connection(ABC):
    """Base class of residual connections of one sublayer, constructed as `Class(config, hidden_size, resources)`."""

    @abstractmethod
    def sublayer_input(self, stream: Tensor, norm: Norm) -> SublayerInput:
        """Computes the input of the sublayer from the residual stream, and normalises it with `norm`."""

    @abstractmethod
    def add_output(self, stream: Tensor, weights: Any, out_SBH: Tensor) -> Tensor:
        """Returns the residual stream after the sublayer, whose output is `out_SBH`. `stream` and `weights` are those
        of its `SublayerInput`."""

    def add_output_and_read(self, stream: Tensor, weights: Any, out_SBH: Tensor, norm: Norm) -> SublayerInput:
        """Adds the output of the sublayer before this one (see `add_output`), then computes the input of this one."""
        return self.sublayer_input(self.add_output(stream, weights, out_SBH), norm)


def new_streams_head(config: ModelConfig, resources: ModelResources) -> nn.Module | None:
    """Creates the module that makes one residual stream of several before the final norm; None if there is only one."""
    residual = config.residual
    if not residual.head_module:
        return None
    return resolve(residual.head_module)(residual, config.hidden_size, resources)


def new_module(config: Component, site: Site, resources: ModelResources) -> Any:
    """Creates the module of a component. The quantizers of its linear layers are named by its path."""
    return resolve(config.module)(config, site, resources.for_layer_module(site.path, site.layer))
