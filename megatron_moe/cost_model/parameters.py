"""How many parameters a model has, counted from its spec without building it."""

from dataclasses import dataclass, fields, replace

from megatron_moe.config.attention import (
    AttentionConfig,
    MLAConfig,
    NormConfig,
)
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import (
    ExpertsConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
)


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Number of parameters by kind. Biases belong to the kind of their matrix."""

    embedding: int = 0
    """Word embedding, padded rows included, and learned positions."""
    attention: int = 0
    """Projections and sinks."""
    dense_mlp: int = 0
    router: int = 0
    """Gate matrices. The aux-loss-free expert bias is a buffer and does not count."""
    experts: int = 0
    shared: int = 0
    """Shared experts and their gates."""
    latent: int = 0
    """Projections into and out of the latent space of the experts."""
    norms: int = 0
    """Norms of layers, of q and k, of compressed q and kv, and the final norm."""
    mtp: int = 0
    """Everything in multi-token prediction: its norms, projections and whole layers."""
    head: int = 0
    """0 when tied to the embedding."""

    def __add__(self, other: "ParamCount") -> "ParamCount":
        return ParamCount(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def without_mtp(self) -> "ParamCount":
        """What the published sizes of models count: multi-token prediction serves training only."""
        return replace(self, mtp=0)


def count_parameters(model: ModelConfig, *, active: bool = False) -> ParamCount:
    """Parameters of the model.

    With `active`, the parameters that one token meets: of the routed experts only `topk` per layer, everything else
    (embedding and head included) whole.
    """
    layers = sum((count_layer(layer, active=active) for layer in model.layers), ParamCount())
    positions = model.max_positions if model.position_embedding == "learned_absolute" else 0
    ends = ParamCount(
        embedding=(model.vocab_size + positions) * model.hidden_size,
        norms=count_norm(model.norm, model.hidden_size),
        head=_head(model),
        mtp=_mtp(model, active),
    )
    return layers + ends


def count_expert_elements(model: ModelConfig) -> int:
    """Parameters that live on the expert grid, those in multi-token prediction included."""
    layers = list(model.layers)
    if model.mtp is not None:
        layers += [model.layers[-1]] * (1 if model.mtp.repeated_layer else model.mtp.num_layers)
    return sum(count_layer(layer).experts for layer in layers)


def _head(model: ModelConfig) -> int:
    matrix = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    return matrix + (model.vocab_size if model.head_bias else 0)


def _mtp(model: ModelConfig, active: bool) -> int:
    """Per depth: two norms on the inputs, the projection [H, 2H], one layer of the last kind, one final norm."""
    if model.mtp is None:
        return 0
    hidden = model.hidden_size
    one = 3 * count_norm(model.norm, hidden) + 2 * hidden * hidden + count_layer(model.layers[-1], active=active).total
    return one * (1 if model.mtp.repeated_layer else model.mtp.num_layers)


def count_layer(layer: LayerConfig, *, active: bool = False) -> ParamCount:
    """Parameters of one layer, or those of them that one token meets."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    attention = _mla(mixer) if isinstance(mixer, MLAConfig) else _attention(mixer)
    norms = ParamCount(norms=2 * count_norm(layer.norm, mixer.hidden_size))
    if isinstance(feed_forward, MoEConfig):
        return attention + norms + _moe(feed_forward, active)
    return attention + norms + ParamCount(dense_mlp=_mlp(feed_forward))


def count_norm(norm: NormConfig, width: int) -> int:
    """Parameters of a norm over `width` channels."""
    return width * (2 if norm.kind == "LayerNorm" else 1)


def _attention(config: AttentionConfig) -> ParamCount:
    matrices = config.hidden_size * (config.qkv_width + config.q_width)
    biases = (config.qkv_width if config.qkv_bias else 0) + (config.hidden_size if config.out_bias else 0)
    sinks = config.num_heads if config.core.sinks else 0
    normed = {"none": 0, "per_head": 2 * config.head_dim, "full": config.q_width + config.kv_width, "l2": 0}[
        config.qk_norm
    ]
    return ParamCount(attention=matrices + biases + sinks, norms=count_norm(config.norm, normed))


def _mla(config: MLAConfig) -> ParamCount:
    q_width = config.num_heads * config.q_head_dim
    if config.q_lora_rank is None:
        query = config.hidden_size * q_width
    else:
        query = config.q_lora_rank * (config.hidden_size + q_width)
    down = config.hidden_size * (config.kv_lora_rank + config.qk_rope_dim)
    up = config.kv_lora_rank * config.num_heads * (config.qk_head_dim + config.v_head_dim)
    out = config.num_heads * config.v_head_dim * config.hidden_size
    sinks = config.num_heads if config.core.sinks else 0
    normed = config.kv_lora_rank + (config.q_lora_rank or 0) if config.qk_norm else 0
    return ParamCount(attention=query + down + up + out + sinks, norms=count_norm(config.norm, normed))


def _mlp(config: MLPConfig) -> int:
    fan, ffn = config.activation.fan, config.ffn_hidden_size
    biases = fan * ffn + config.hidden_size if config.bias else 0
    return (fan + 1) * ffn * config.hidden_size + biases


def _moe(config: MoEConfig, active: bool) -> ParamCount:
    latent = 2 * config.router.hidden_size * config.latent_size if config.latent_size else 0
    visited = config.router.topk if active else config.experts.num_experts
    return ParamCount(
        router=_router(config.router),
        experts=visited * _expert(config.experts),
        shared=_shared(config.shared) if config.shared else 0,
        latent=latent,
    )


def _router(config: RouterConfig) -> int:
    return config.num_experts * (config.hidden_size + (1 if config.linear_bias else 0))


def _expert(config: ExpertsConfig) -> int:
    fan, ffn = config.activation.fan, config.ffn_hidden_size
    biases = fan * ffn + config.hidden_size if config.bias else 0
    return (fan + 1) * ffn * config.hidden_size + biases


def _shared(config: SharedExpertsConfig) -> int:
    return _mlp(config.mlp) + (config.mlp.hidden_size if config.gate else 0)
