"""Model architecture: layers, multi-token prediction, initialisation and the GPT itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megatron_moe.config.attention import AttentionConfig, MLAConfig, NormConfig
from megatron_moe.config.moe import MLPConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One transformer layer: norm, attention, norm and feed-forward, with two residual connections."""

    mixer: AttentionConfig | MLAConfig
    feed_forward: MLPConfig | MoEConfig
    norm: NormConfig
    hidden_dropout: float = 0.0
    residual_from_norm: bool = False
    """The residual is the output of the norm instead of its input (`--apply-residual-connection-post-layernorm`)."""

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoEConfig)

    def shard(self, parallel: ParallelConfig) -> "LayerConfig":
        """Config of one rank's shard of the layer."""
        mixer, feed_forward = self.mixer.shard(parallel.tp), self.feed_forward.shard(parallel)
        return replace(self, mixer=mixer, feed_forward=feed_forward)


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437 section 2.2)."""

    num_layers: int
    loss_scaling_factor: float = 0.1
    repeated_layer: bool = False
    """All depths share the weights of one layer (`--mtp-use-repeated-layer`)."""
    detach_heads: bool = False
    """The MTP loss trains the MTP layers only, not the decoder, embedding and head (`--mtp-detach-heads`)."""

    @property
    def num_distinct_layers(self) -> int:
        """Number of MTP layers with their own weights: 1 if all depths share one layer."""
        return 1 if self.repeated_layer else self.num_layers


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Distribution of the initial weights."""

    std: float = 0.02
    """Standard deviation of matrices that read the residual stream (`--init-method-std`)."""
    output_std: float = 0.02
    """Standard deviation of matrices that write to the residual stream; Megatron: std / sqrt(2 * num_layers)."""
    embedding_std: float | None = None
    """Standard deviation of the embedding (`--embedding-init-method-std`); None: `std`."""
    method: Literal["normal", "unit_gain", "xavier_uniform"] = "normal"
    """normal: with the standard deviations above.
    xavier_uniform: uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010); `embedding_std` still applies.
    unit_gain: std = 1 / sqrt(fan_in), with random norm weights, biases and expert biases; for numerical tests."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT: embedding, decoder layers, final norm, output head and optional multi-token prediction."""

    hidden_size: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    """Final norm."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    max_positions: int = 4096
    """Rows of the learned position embedding (`--max-position-embeddings`)."""
    tied_embeddings: bool = True
    head_bias: bool = False
    loss_chunk: int | None = None
    """Tokens per chunk of the fused linear cross-entropy, which recomputes the logits of a chunk in backward. None:
    the logits of the whole microbatch are materialised and saved."""
    embedding_dropout: float = 0.0
    """`--hidden-dropout`"""
    mtp: MTPConfig | None = None
    init: InitConfig = InitConfig()

    @property
    def num_mtp(self) -> int:
        """Depths of multi-token prediction."""
        return self.mtp.num_layers if self.mtp else 0

    @property
    def moe_configs(self) -> tuple[MoEConfig, ...]:
        """MoE configurations of the layers that have experts, one per layer."""
        return tuple(layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoEConfig))


def with_experts(config: ModelConfig, change: Callable[[MoEConfig], MoEConfig]) -> ModelConfig:
    """Returns the model with `change` applied to the config of every MoE layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feed_forward, MoEConfig):
            return layer
        return replace(layer, feed_forward=change(layer.feed_forward))

    return replace(config, layers=tuple(map(changed, config.layers)))
