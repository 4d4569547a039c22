"""Model architecture: transformer layers, multi-token prediction, initial weights and the complete GPT."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.component import (
    Component,
    FeedForwardConfig,
    MegatronName,
    MixerConfig,
    ParamSpec,
    linear_parameters,
)
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.residual import AddedResidual, ResidualConfig


class Sublayer(NamedTuple):
    """Residual branch of a layer: a module with its norm."""

    name: str
    """Name of the module in the layer."""
    norm: str
    """Name of the norm before the module."""
    component: Component


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Pre-norm transformer layer: a mixer and a feed-forward module, each with a norm and a residual connection.

    Either may be absent (`NoMixer`, `NoFeedForward`), with its norm and its residual connection.
    """

    mixer: MixerConfig
    feed_forward: FeedForwardConfig
    norm: NormConfig
    hidden_dropout: float = 0.0
    residual: ResidualConfig = AddedResidual()

    def __hash__(self) -> int:
        # A hash of all fields takes 50 us, and the cost model looks up every layer of a plan many thousand times.
        return hash((type(self.mixer), type(self.feed_forward)))

    @property
    def hidden_size(self) -> int:
        return self.mixer.hidden_size

    @property
    def moe(self) -> MoEConfig | None:
        """Routed experts of the layer; None if it has none."""
        experts: MoEConfig | None = self.feed_forward.routed_experts
        return experts

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Residual branches in order: the mixer and the feed-forward module, unless absent."""
        both = (
            Sublayer("self_attention", "input_layernorm", self.mixer),
            Sublayer("mlp", "pre_mlp_layernorm", self.feed_forward),
        )
        return tuple(each for each in both if each.component.present)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Yields the parameters of the layer with names relative to it."""
        return iter(_parameters_of(self, parallel))

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        """First problem of the mixer or feed-forward module (see `Component.layout_problem`); None if there is none."""
        return self.mixer.layout_problem(parallel) or self.feed_forward.layout_problem(parallel)


@lru_cache(maxsize=64)
def _parameters_of(layer: LayerConfig, parallel: ParallelConfig) -> tuple[ParamSpec, ...]:
    """See `LayerConfig.parameters`, which the search of a layout calls many thousand times."""
    found: list[ParamSpec] = []
    for name, norm, component in layer.sublayers:
        connection = f"{name}_{layer.residual.submodule}"
        found += _within(connection, layer.residual.parameters(layer.hidden_size, parallel))
        found += layer.norm.parameters(norm, layer.hidden_size, parallel)
        found += _within(name, component.parameters(parallel))
    return tuple(found)


def _within(prefix: str, parameters: Iterable[ParamSpec]) -> Iterator[ParamSpec]:
    for spec in parameters:
        yield spec.named(f"{prefix}.{spec.name}")


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437 section 2.2)."""

    num_layers: int
    loss_scaling_factor: float = 0.1
    repeated_layer: bool = False
    """All prediction depths share the weights of one layer (`--mtp-use-repeated-layer`)."""
    detach_heads: bool = False
    """The MTP loss trains the MTP layers only, not the decoder, embedding and head (`--mtp-detach-heads`)."""
    layer: LayerConfig | None = None
    """Transformer layer of a prediction depth; None means the last decoder layer."""

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
    """Standard deviation of matrices that write to the residual stream. Megatron uses std / sqrt(number of residual
    branches), of which a layer with attention and MLP has two."""
    embedding_std: float | None = None
    """Standard deviation of the embedding (`--embedding-init-method-std`). None means the value of `std`."""
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
    """Final norm, after the last decoder layer."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    max_positions: int = 4096
    """Number of rows of the learned position embedding (`--max-position-embeddings`)."""
    tied_embeddings: bool = True
    head_bias: bool = False
    loss_chunk: int | None = None
    """Number of tokens per chunk of the fused linear cross-entropy, which recomputes the logits of each chunk in
    backward. None means that the logits of the whole microbatch are computed together and saved."""
    embedding_dropout: float = 0.0
    """Dropout probability of the embedding output (`--hidden-dropout`)."""
    mtp: MTPConfig | None = None
    init: InitConfig = InitConfig()

    @property
    def residual(self) -> ResidualConfig:
        """Config of the residual connections, which is the same for all layers."""
        return self.layers[0].residual

    @property
    def num_mtp(self) -> int:
        """Number of depths of multi-token prediction; 0 if disabled."""
        return self.mtp.num_layers if self.mtp else 0

    @property
    def mtp_layer(self) -> LayerConfig:
        """Transformer layer of a depth of multi-token prediction."""
        return self.mtp.layer if self.mtp is not None and self.mtp.layer is not None else self.layers[-1]

    @property
    def moe_configs(self) -> tuple[MoEConfig, ...]:
        """Config of each MoE layer, in the order of the layers."""
        return tuple(layer.moe for layer in self.layers if layer.moe is not None)

    @property
    def megatron_names(self) -> dict[str, tuple[MegatronName, ...]]:
        """Parameter name within a layer, the decoder or an MTP layer -> other names in Megatron checkpoints."""
        found: dict[str, tuple[MegatronName, ...]] = {"eh_proj.weight": (("e_proj.weight", "h_proj.weight"),)}
        for layer in dict.fromkeys(self.layers):
            for prefix, _, component in layer.sublayers:
                found |= component.megatron_names
                connection = f"{prefix}_{layer.residual.submodule}"
                for name, other in layer.residual.megatron_names.items():
                    parts = (other,) if isinstance(other, str) else other
                    found[f"{connection}.{name}"] = (tuple(f"{connection}.{part}" for part in parts),)
        head = self.residual.head_megatron_names
        return found | {f"streams_head.{name}": (other,) for name, other in head.items()}

    def embedding_parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Parameters of the embedding: words, and positions if they are learned."""
        meta = ParamMeta(
            role="embedding",
            init="embedding",
            # the fan-in is hidden_size, because a tied head sums over that many inputs
            fan_in=self.hidden_size if self.tied_embeddings else 1,
            tp_dim=0,
            # as in Megatron, the embedding has no weight decay with --embedding-init-method-std, which sets its scale
            decay=self.init.embedding_std is None,
            shared_stages=parallel.pp > 1 and (self.tied_embeddings or self.mtp is not None),
        )
        shape = (self.vocab_size, self.hidden_size)
        yield ParamSpec(name="word_embeddings.weight", shape=shape, meta=meta, counted="embedding")
        if self.position_embedding == "learned_absolute":
            partial = parallel.sequence_parallel
            meta = replace(meta, role="position", fan_in=1, tp_dim=None, partial_over_tp=partial)
            shape = (self.max_positions, self.hidden_size)
            yield ParamSpec(name="position_embeddings.weight", shape=shape, meta=meta, counted="embedding")

    def head_parameters(self) -> Iterator[ParamSpec]:
        """Parameters of the output layer, without the weight if it is tied to the embedding."""
        if not self.tied_embeddings:
            meta = ParamMeta(role="head", fan_in=self.hidden_size, tp_dim=0)
            yield ParamSpec(name="weight", shape=(self.vocab_size, self.hidden_size), meta=meta, counted="head")
        if self.head_bias:
            meta = ParamMeta(role="bias", init="zeros", tp_dim=0, decay=False)
            yield ParamSpec(name="bias", shape=(self.vocab_size,), meta=meta, counted="head")

    def final_norm_parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Parameters of the norm after the last layer, and of the head of several residual streams before it."""
        yield from _within("streams_head", self.residual.head_parameters(self.hidden_size, parallel))
        yield from self.norm.parameters("final_layernorm", self.hidden_size, parallel)

    def mtp_parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Parameters of one MTP layer: three norms, a projection [H, 2H] and a transformer layer."""
        hidden = self.hidden_size
        for name in ("enorm", "hnorm"):
            yield from self.norm.parameters(name, hidden, parallel)
        yield from self.final_norm_parameters(parallel)
        shape = (hidden, 2 * hidden)
        yield from linear_parameters("eh_proj", shape, parallel, counted="attention", low="mtp", tp_dim=0)
        yield from _within("transformer_layer", self.mtp_layer.parameters(parallel))


def with_experts(config: ModelConfig, change: Callable[[MoEConfig], MoEConfig]) -> ModelConfig:
    """Returns a copy of the model config in which `change` is applied to the config of every MoE layer."""

    return with_feed_forwards(config, lambda each: change(each.routed_experts) if each.routed_experts else each)


def with_feed_forwards(config: ModelConfig, change: Callable[[FeedForwardConfig], FeedForwardConfig]) -> ModelConfig:
    """Returns a copy of the model config in which `change` is applied to the feed-forward config of every layer."""

    def changed_layer(layer: LayerConfig) -> LayerConfig:
        return replace(layer, feed_forward=change(layer.feed_forward))

    mtp = config.mtp and replace(config.mtp, layer=config.mtp.layer and changed_layer(config.mtp.layer))
    return replace(config, layers=tuple(map(changed_layer, config.layers)), mtp=mtp)
