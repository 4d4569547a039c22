"""Residual connections: how the modules of a layer read the residual stream and write to it.

A residual connection is a frozen config without torch, which states its sizes and costs, and a module per sublayer that
computes it (`layers/components.py`). It is registered by name (`config/registry.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Base of the configs of residual connections. All layers of a model have equal ones."""

    module: ClassVar[str]
    """Class of the connection of one sublayer: "package.file:Class", imported when the model is built."""

    def as_flags(self) -> Mapping[str, Any]:
        """Values of the flags that select the connection."""
        return {}


@dataclass(frozen=True, kw_only=True)
class AddedResidual(ResidualConfig):
    """Adds the output of a sublayer to the residual stream: x = x + module(norm(x))."""

    module: ClassVar[str] = "megatron_moe.model.transformer_layer:AddedConnection"

    from_norm: bool = False
    """Adds to the norm's output instead of its input (`--apply-residual-connection-post-layernorm`)."""

    def as_flags(self) -> Mapping[str, Any]:
        return {"apply_residual_connection_post_layernorm": self.from_norm}
