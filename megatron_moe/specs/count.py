"""How many parameters a model has, counted from its spec without building it."""

from dataclasses import dataclass, fields, replace

from megatron_moe.specs.attention import AttentionSpec, MLASpec, NormSpec
from megatron_moe.specs.model import LayerSpec, ModelSpec
from megatron_moe.specs.moe import ExpertsSpec, MLPSpec, MoESpec, RouterSpec, SharedExpertsSpec


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


def count_parameters(model: ModelSpec, *, active: bool = False) -> ParamCount:
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


def count_expert_elements(model: ModelSpec) -> int:
    """Parameters that live on the expert grid, those in multi-token prediction included."""
    layers = list(model.layers)
    if model.mtp is not None:
        layers += [model.layers[-1]] * (1 if model.mtp.repeated_layer else model.mtp.num_layers)
    return sum(count_layer(layer).experts for layer in layers)


def _head(model: ModelSpec) -> int:
    matrix = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    return matrix + (model.vocab_size if model.head_bias else 0)


def _mtp(model: ModelSpec, active: bool) -> int:
    """Per depth: two norms on the inputs, the projection [H, 2H], one layer of the last kind, one final norm."""
    if model.mtp is None:
        return 0
    hidden = model.hidden_size
    one = 3 * count_norm(model.norm, hidden) + 2 * hidden * hidden + count_layer(model.layers[-1], active=active).total
    return one * (1 if model.mtp.repeated_layer else model.mtp.num_layers)


def count_layer(layer: LayerSpec, *, active: bool = False) -> ParamCount:
    """Parameters of one layer, or those of them that one token meets."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    attention = _mla(mixer) if isinstance(mixer, MLASpec) else _attention(mixer)
    norms = ParamCount(norms=2 * count_norm(layer.norm, mixer.hidden_size))
    if isinstance(feed_forward, MoESpec):
        return attention + norms + _moe(feed_forward, active)
    return attention + norms + ParamCount(dense_mlp=_mlp(feed_forward))


def count_norm(norm: NormSpec, width: int) -> int:
    """Parameters of a norm over `width` channels."""
    return width * (2 if norm.kind == "LayerNorm" else 1)


def _attention(spec: AttentionSpec) -> ParamCount:
    matrices = spec.hidden_size * (spec.qkv_width + spec.q_width)
    biases = (spec.qkv_width if spec.qkv_bias else 0) + (spec.hidden_size if spec.out_bias else 0)
    sinks = spec.num_heads if spec.core.sinks else 0
    normed = {"none": 0, "per_head": 2 * spec.head_dim, "full": spec.q_width + spec.kv_width, "l2": 0}[spec.qk_norm]
    return ParamCount(attention=matrices + biases + sinks, norms=count_norm(spec.norm, normed))


def _mla(spec: MLASpec) -> ParamCount:
    q_width = spec.num_heads * spec.q_head_dim
    if spec.q_lora_rank is None:
        query = spec.hidden_size * q_width
    else:
        query = spec.q_lora_rank * (spec.hidden_size + q_width)
    down = spec.hidden_size * (spec.kv_lora_rank + spec.qk_rope_dim)
    up = spec.kv_lora_rank * spec.num_heads * (spec.qk_head_dim + spec.v_head_dim)
    out = spec.num_heads * spec.v_head_dim * spec.hidden_size
    sinks = spec.num_heads if spec.core.sinks else 0
    normed = spec.kv_lora_rank + (spec.q_lora_rank or 0) if spec.qk_norm else 0
    return ParamCount(attention=query + down + up + out + sinks, norms=count_norm(spec.norm, normed))


def _mlp(spec: MLPSpec) -> int:
    fan, ffn = spec.activation.fan, spec.ffn_hidden_size
    biases = fan * ffn + spec.hidden_size if spec.bias else 0
    return (fan + 1) * ffn * spec.hidden_size + biases


def _moe(spec: MoESpec, active: bool) -> ParamCount:
    latent = 2 * spec.router.hidden_size * spec.latent_size if spec.latent_size else 0
    visited = spec.router.topk if active else spec.experts.num_experts
    return ParamCount(
        router=_router(spec.router),
        experts=visited * _expert(spec.experts),
        shared=_shared(spec.shared) if spec.shared else 0,
        latent=latent,
    )


def _router(spec: RouterSpec) -> int:
    return spec.num_experts * (spec.hidden_size + (1 if spec.linear_bias else 0))


def _expert(spec: ExpertsSpec) -> int:
    fan, ffn = spec.activation.fan, spec.ffn_hidden_size
    biases = fan * ffn + spec.hidden_size if spec.bias else 0
    return (fan + 1) * ffn * spec.hidden_size + biases


def _shared(spec: SharedExpertsSpec) -> int:
    return _mlp(spec.mlp) + (spec.mlp.hidden_size if spec.gate else 0)
