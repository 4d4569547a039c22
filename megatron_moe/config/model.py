"""Model architecture: transformer layers, multi-token prediction, initial weights and the complete GPT."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megatron_moe.config.attention import AttentionConfig, NormConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Pre-norm transformer layer: attention and feed-forward, each with a norm and a residual connection."""

    mixer: AttentionConfig | MLAConfig
    feed_forward: MLPConfig | MoEConfig
    norm: NormConfig
    hidden_dropout: float = 0.0
    residual_from_norm: bool = False
    """Uses the norm's output, not its input, as the residual (`--apply-residual-connection-post-layernorm`)."""

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoEConfig)

    def shard(self, parallel: ParallelConfig) -> "LayerConfig":
        """Config of the part of the layer that one rank holds."""
        mixer, feed_forward = self.mixer.shard(parallel.tp), self.feed_forward.shard(parallel)
        return replace(self, mixer=mixer, feed_forward=feed_forward)


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437 section 2.2)."""

    num_layers: int
    loss_scaling_factor: float = 0.1
    repeated_layer: bool = False
    """All prediction depths share the weights of one layer (`--mtp-use-repeated-layer`)."""
    detach_heads: bool = False
    """The MTP loss trains the MTP layers only, not the decoder, embedding and head (`--mtp-detach-heads`)."""

    @property
    def num_distinct_layers(self) -> int:
        """Number of MTP layers with separate weights: 1 if `repeated_layer`, else `num_layers`."""
        return 1 if self.repeated_layer else self.num_layers


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Distribution of the initial weights."""

    std: float = 0.02
    """Standard deviation of matrices that read the residual stream (`--init-method-std`)."""
    output_std: float = 0.02
    """Standard deviation of matrices that write to the residual stream. Megatron uses std / sqrt(2 * num_layers)."""
    embedding_std: float | None = None
    """Standard deviation of the embedding (`--embedding-init-method-std`). None: equal to `std`."""
    method: Literal["normal", "unit_gain", "xavier_uniform"] = "normal"
    """- "normal": normal distribution with `std`, `output_std` and `embedding_std`.
    - "xavier_uniform": uniform in +-sqrt(6 / (fan_in + fan_out)); the embedding uses `embedding_std` if that is set.
    - "unit_gain", for tests: std = 1 / sqrt(fan_in); norm weights, biases and expert biases are random too."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT: embedding, decoder layers, final norm, output head and optional multi-token prediction."""

    hidden_size: int
    vocab_size: int
    """Number of rows of the embedding, including padding."""
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    """Norm after the last layer."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    max_positions: int = 4096
    """Number of rows of the learned position embedding (`--max-position-embeddings`)."""
    tied_embeddings: bool = True
    head_bias: bool = False
    loss_chunk: int | None = None
    """Number of tokens per chunk of the fused linear cross-entropy, which recomputes the logits of each chunk in
    backward. None: the logits of the whole microbatch are computed at once and saved."""
    embedding_dropout: float = 0.0
    """Dropout probability of the embedding output (`--hidden-dropout`)."""
    mtp: MTPConfig | None = None
    init: InitConfig = InitConfig()

    @property
    def num_mtp(self) -> int:
        """Number of depths of multi-token prediction; 0 if disabled."""
        return self.mtp.num_layers if self.mtp else 0

    @property
    def moe_configs(self) -> tuple[MoEConfig, ...]:
        """Config of each MoE layer, in the order of the layers."""
        return tuple(layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoEConfig))


def with_experts(config: ModelConfig, change: Callable[[MoEConfig], MoEConfig]) -> ModelConfig:
    """Returns a copy of the model config in which `change` is applied to the config of every MoE layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feed_forward, MoEConfig):
            return layer
        return replace(layer, feed_forward=change(layer.feed_forward))

    return replace(config, layers=tuple(map(changed, config.layers)))
