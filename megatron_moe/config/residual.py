"""Residual connections: how the modules of a layer read the residual stream and write to it.

A residual connection is a frozen config without torch, which states its sizes and costs, and a module per sublayer that
computes it (`layers/components.py`). It is registered by name (`config/registry.py`). Letters in shapes: as in
`config/component.py`, and n residual streams.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import MegatronName, NameRule, ParamSpec
from megatron_moe.config.costs import ActivationSizes, SavedActivation
from megatron_moe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Base of the configs of residual connections. The default of a method describes one stream without parameters.

    Several streams [S, B, n H] start as copies of the embedding, and a module with parameters, the head, reduces them
    to one before the final norm. All layers of a model have the same number of streams.
    """

    module: ClassVar[str]
    """Class of the connection of one sublayer: "package.file:Class", imported when the model is built."""
    head_module: ClassVar[str] = ""
    """Class of the head; empty if there is none."""
    submodule: ClassVar[str] = ""
    """Suffix of the name of a sublayer's connection in the layer; empty if it has no parameters."""

    megatron_names: ClassVar[Mapping[str, MegatronName]] = MappingProxyType({})
    """Maps parameter names of a connection to their names in Megatron checkpoints, if these differ."""
    head_megatron_names: ClassVar[Mapping[str, MegatronName]] = MappingProxyType({})
    """Maps parameter names of the head to their names in Megatron checkpoints, relative to the decoder or MTP layer."""

    num_streams: int = 1

    def as_flags(self) -> Mapping[str, Any]:
        """Values of the flags that select the connection."""
        return {}

    def parameters(self, hidden_size: int, parallel: ParallelConfig) -> Iterable[ParamSpec]:
        """Parameters of the connection of one sublayer."""
        return ()

    def head_parameters(self, hidden_size: int, parallel: ParallelConfig) -> Iterable[ParamSpec]:
        """Parameters of the head, which reduces several residual streams to one before the final norm."""
        return ()

    def saved_tensors(
        self, module: str, hidden_size: int, sizes: ActivationSizes, *, is_first: bool, offloaded_by: str
    ) -> Iterable[SavedActivation]:
        """Tensors that the connection of one sublayer saves, in addition to those of the norm.

        Args:
            module: label of the tensors (`SavedActivation.module`).
            is_first: whether the sublayer is the first one of its layer.
            offloaded_by: value of `--offload-modules` for tensors that are saved when the sublayer's input is read.
        """
        return ()

    def input_fields(self) -> Mapping[str, Any]:
        """Fields of `SavedActivation` for the input of a sublayer's norm."""
        return {}

    def head_tensors(self, module: str, hidden_size: int, sizes: ActivationSizes) -> Iterable[SavedActivation]:
        """Tensors that the head saves for backward."""
        return ()

    def backward_workspace(self, hidden_size: int, sizes: ActivationSizes) -> float:
        """Peak bytes of gradients and temporary tensors in the backward of a connection."""
        return 0.0

    def name_rules(self, sublayer: str, model_type: str) -> Iterable[NameRule]:
        """Names in Hugging Face folders of the parameters of a sublayer's connection. `sublayer`: self_attention or
        mlp."""
        return ()

    def head_name_rules(self, model_type: str) -> Iterable[NameRule]:
        """Names in Hugging Face folders of the parameters of the head; those of MTP are relative to its layer."""
        return ()


@dataclass(frozen=True, kw_only=True)
class AddedResidual(ResidualConfig):
    """Adds the output of a sublayer to the residual stream: x = x + module(norm(x))."""

    module: ClassVar[str] = "megatron_moe.model.transformer_layer:AddedConnection"

    from_norm: bool = False
    """Adds to the norm's output instead of its input (`--apply-residual-connection-post-layernorm`)."""

    def as_flags(self) -> Mapping[str, Any]:
        return {"apply_residual_connection_post_layernorm": self.from_norm}
