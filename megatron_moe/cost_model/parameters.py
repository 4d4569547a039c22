"""Parameter counts, computed from a model's configuration without building it."""

from dataclasses import dataclass, replace

from megatron_moe.config.attention import AttentionConfig, NormConfig
from megatron_moe.config.costs import CostSum
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MoEConfig


@dataclass(frozen=True, kw_only=True)
class ParamCount(CostSum[int]):
    """Number of parameters by kind. Biases are counted with their weight matrix."""

    embedding: int = 0
    """Word embedding, including the rows that pad the vocabulary, and learned position embedding."""
    attention: int = 0
    """Attention projections, their biases and the sink logits."""
    dense_mlp: int = 0
    router: int = 0
    """Router weight and bias. The expert bias of auxiliary-loss-free balancing is a buffer and is not counted."""
    experts: int = 0
    shared: int = 0
    """Shared experts and their gates."""
    latent: int = 0
    """Projections into and out of the experts' latent space."""
    norms: int = 0
    """Layer norms, q and k norms, norms of MLA's compressed q and kv, and the final norm."""
    mtp: int = 0
    """Norms, projections and layers of multi-token prediction."""
    head: int = 0
    """Weight and bias of the output head. A weight that is tied to the embedding is not counted."""

    @property
    def without_mtp(self) -> "ParamCount":
        """Counts without multi-token prediction, as in published model sizes."""
        return replace(self, mtp=0)


def count_parameters(model: ModelConfig, *, active: bool = False) -> ParamCount:
    """Parameter counts of the model. `active`: counts only the `topk` routed experts per layer that process a token."""
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
    """Number of parameters of all routed experts, including those in layers of multi-token prediction."""
    layers = list(model.layers)
    if model.mtp is not None:
        layers += [model.layers[-1]] * model.mtp.num_distinct_layers
    return sum(count_layer(layer).experts for layer in layers)


def _head(model: ModelConfig) -> int:
    matrix = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    return matrix + (model.vocab_size if model.head_bias else 0)


def _mtp(model: ModelConfig, active: bool) -> int:
    """Number of MTP parameters. Each layer has 3 norms, a projection [H, 2H] and a copy of the last layer."""
    if model.mtp is None:
        return 0
    hidden = model.hidden_size
    one = 3 * count_norm(model.norm, hidden) + 2 * hidden * hidden + count_layer(model.layers[-1], active=active).total
    return one * model.mtp.num_distinct_layers


def count_layer(layer: LayerConfig, *, active: bool = False) -> ParamCount:
    """Parameter counts of one layer. `active`: counts only `topk` of the routed experts."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    attention = _mla(mixer) if isinstance(mixer, MLAConfig) else _attention(mixer)
    norms = ParamCount(norms=2 * count_norm(layer.norm, mixer.hidden_size))
    return attention + norms + _feed_forward(feed_forward, active)


def count_norm(norm: NormConfig, width: int) -> int:
    """Number of parameters of a norm over `width` channels."""
    return width * (2 if norm.kind == "LayerNorm" else 1)


def _attention(config: AttentionConfig) -> ParamCount:
    biases = (config.qkv_width if config.qkv_bias else 0) + (config.hidden_size if config.out_bias else 0)
    sinks = config.num_heads if config.core.sinks else 0
    normed = {"none": 0, "per_head": 2 * config.head_dim, "full": config.q_width + config.kv_width, "l2": 0}[
        config.qk_norm
    ]
    return ParamCount(attention=config.matrix_elements + biases + sinks, norms=count_norm(config.norm, normed))


def _mla(config: MLAConfig) -> ParamCount:
    sinks = config.num_heads if config.core.sinks else 0
    normed = config.kv_lora_rank + (config.q_lora_rank or 0) if config.qk_norm else 0
    return ParamCount(attention=config.matrix_elements + sinks, norms=count_norm(config.norm, normed))


def _feed_forward(config: MLPConfig | MoEConfig, active: bool) -> ParamCount:
    if isinstance(config, MLPConfig):
        return ParamCount(dense_mlp=config.num_params)
    router = config.router
    return ParamCount(
        router=router.num_experts * (router.hidden_size + (1 if router.linear_bias else 0)),
        experts=(router.topk if active else config.experts.num_experts) * config.experts.num_params,
        shared=config.shared.num_params if config.shared else 0,
        latent=config.latent_elements,
    )
