"""Manifold-constrained hyper-connections (arXiv 2512.24880); `config/hyper_connections.py` has the formulas.

The residual streams are one tensor [S, B, n H].

With `--recompute-modules mhc`, a layer saves its input streams and the outputs of its sublayers. The input of a
sublayer and the streams between the sublayers are computed again in backward.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.layers.components import Connection, SublayerInput
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import DiscardScope
from megatron_moe.parallel.parameter import Parameter, new_parameter


@dataclass(frozen=True)
class _Writing:
    """Coefficients with which a sublayer's output is written to the streams, and the saved-tensor scope of the
    streams."""

    post_TN: Tensor
    mix_TNN: Tensor
    scope: DiscardScope


class _Projection(nn.Module):
    """Parameters of the projection from the residual streams to their mixing coefficients."""

    def __init__(self, specs: Any, resources: ModelResources) -> None:
        super().__init__()
        self.kernels = resources.kernels
        created = {spec.name: new_parameter(spec.shape, spec.meta, resources.ctx) for spec in specs}
        self.mapping_proj = nn.ParameterDict({"weight": created["mapping_proj.weight"]})
        self.scale: Parameter = created["scale"]
        self.bias: Parameter = created["bias"]

    @property
    def parameters_of_streams(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mapping_proj["weight"], self.scale, self.bias


class HyperConnection(_Projection, Connection):
    """Hyper-connection of one sublayer: reads its input from the residual streams and writes its output to them."""

    def __init__(self, config: HyperConnectionsConfig, hidden_size: int, resources: ModelResources) -> None:
        super().__init__(config.parameters(hidden_size, resources.ctx.config), resources)
        self.config = config
        self._saved_tensors = resources.saved_tensors

    def sublayer_input(self, stream: Tensor, norm: Norm) -> SublayerInput:
        return self._read(stream, norm, DiscardScope())

    def add_output(self, stream: Tensor, weights: _Writing, out_SBH: Tensor) -> Tensor:
        with weights.scope:
            return self.kernels.hyper_connection_write(stream, out_SBH, weights.post_TN, weights.mix_TNN)

    def add_output_and_read(self, stream: Tensor, weights: _Writing, out_SBH: Tensor, norm: Norm) -> SublayerInput:
        new_SBW, inputs = self.add_output(stream, weights, out_SBH), (stream, out_SBH, weights.post_TN, weights.mix_TNN)
        with weights.scope:
            scope = self._saved_tensors.discard_output("mhc", self.kernels.hyper_connection_write, inputs, new_SBW)
        return self._read(new_SBW, norm, scope)

    def _read(self, stream: Tensor, norm: Norm, scope: DiscardScope) -> SublayerInput:
        """Reads the sublayer's input from the streams. `scope`: saved-tensor scope in which the streams are saved."""
        saved_tensors = self._saved_tensors
        with scope:
            stream, hidden_SBH, pre_TN, post_TN, mix_TNN = self.kernels.hyper_connection_read(
                stream, *self.parameters_of_streams, self.config
            )
            inputs = (stream, pre_TN.detach())
            remake = saved_tensors.discard_output("mhc", self.kernels.hyper_connection_sum, inputs, hidden_SBH)
            with remake:
                normed_SBH = norm(hidden_SBH)
                discard = saved_tensors.discard_output("layernorm", norm.forward_unquantized, (hidden_SBH,), normed_SBH)
        return SublayerInput(stream, normed_SBH, discard, _Writing(post_TN, mix_TNN, scope))


class StreamsHead(_Projection):
    """Reduces several residual streams to one, before the final norm."""

    def __init__(self, config: HyperConnectionsConfig, hidden_size: int, resources: ModelResources) -> None:
        super().__init__(config.head_parameters(hidden_size, resources.ctx.config), resources)
        self.config = config

    def forward(self, stream: Tensor) -> Tensor:
        """[S, B, n H] -> [S, B, H]."""
        return self.kernels.hyper_connection_read(stream, *self.parameters_of_streams, self.config)[1]
