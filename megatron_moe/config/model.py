"""What the whole model is: narrow frozen specs, no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megatron_moe.config.attention import (
    AttentionConfig,
    MLAConfig,
    NormConfig,
)
from megatron_moe.config.moe import MLPConfig, MoEConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One transformer layer: norm, mixer, norm, feed-forward, with two residual connections."""

    mixer: AttentionConfig | MLAConfig
    feed_forward: MLPConfig | MoEConfig
    norm: NormConfig
    hidden_dropout: float = 0.0
    residual_from_norm: bool = False
    """Both residual connections start behind the norm, not before it."""

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoEConfig)


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437 section 2.2)."""

    num_layers: int
    loss_scaling_factor: float = 0.1
    repeated_layer: bool = False
    """One layer applied `num_layers` times."""
    detach_heads: bool = False


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial values. `std` for matrices that read the residual stream, `output_std` for those that write to it."""

    std: float = 0.02
    output_std: float = 0.02
    """Megatron: std / sqrt(2 * num_layers)."""
    embedding_std: float | None = None
    method: Literal["normal", "unit_gain", "xavier_uniform"] = "normal"
    """unit_gain: std = 1 / sqrt(fan-in) everywhere and random norm weights, biases and expert biases; for proofs.
    xavier_uniform: matrices are uniform within sqrt(6 / (inputs + outputs)) (Glorot, Bengio 2010), whatever `std`; an
    embedding with an `embedding_std` is normal."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT: embedding, layers, final norm, head, optional multi-token prediction."""

    hidden_size: int
    vocab_size: int
    """Padded vocabulary, rows of the embedding."""
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    """Of the final norm."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    max_positions: int = 4096
    tied_embeddings: bool = True
    head_bias: bool = False
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; the backward makes them again. None: all of a microbatch, made once."""
    embedding_dropout: float = 0.0
    mtp: MTPConfig | None = None
    init: InitConfig = InitConfig()


def with_experts(config: ModelConfig, change: Callable[[MoEConfig], MoEConfig]) -> ModelConfig:
    """The model with the config of every MoE layer changed."""

    def changed(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feed_forward, MoEConfig):
            return layer
        return replace(layer, feed_forward=change(layer.feed_forward))

    return replace(config, layers=tuple(map(changed, config.layers)))
