"""What one rank holds of the model: the same specs with this rank's share of heads, channels, experts and vocabulary.

Everything that counts parameters or activations of a whole layer then counts a rank's share of it.
"""

from collections import Counter
from dataclasses import dataclass, replace

from megatron_moe.config.attention import AttentionConfig, MLAConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MLPConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.parameters import (
    ParamCount,
    count_layer,
    count_norm,
)
from megatron_moe.pipeline.layout import PipelineLayout, StageLayout


@dataclass(frozen=True, kw_only=True)
class HeldElements:
    """Parameters of one rank, in elements, by the grid that they live on."""

    attention: int = 0
    expert: int = 0

    def __add__(self, other: "HeldElements") -> "HeldElements":
        return HeldElements(attention=self.attention + other.attention, expert=self.expert + other.expert)

    def __mul__(self, times: int) -> "HeldElements":
        return HeldElements(attention=self.attention * times, expert=self.expert * times)

    @property
    def total(self) -> int:
        return self.attention + self.expert


def share_of_layer(layer: LayerConfig, parallel: ParallelConfig) -> LayerConfig:
    """The layer as one rank computes it: heads and dense channels over tp, experts over ep, their channels over etp.

    With fewer query groups than ranks this has one group, of which the rank holds only a part (`_shared_rows`).
    """
    tp = parallel.tp
    mixer: AttentionConfig | MLAConfig = replace(layer.mixer, num_heads=layer.mixer.num_heads // tp)
    if isinstance(mixer, AttentionConfig):
        mixer = replace(mixer, num_query_groups=max(mixer.num_query_groups // tp, 1))
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, MLPConfig):
        return replace(layer, mixer=mixer, feed_forward=_share_of_mlp(feed_forward, tp))
    experts, shared = feed_forward.experts, feed_forward.shared
    mine = replace(
        experts,
        num_experts=experts.num_experts // parallel.ep,
        ffn_hidden_size=experts.ffn_hidden_size // parallel.etp,
    )
    if shared is not None:
        shared = replace(shared, mlp=_share_of_mlp(shared.mlp, tp))
    return replace(layer, mixer=mixer, feed_forward=replace(feed_forward, experts=mine, shared=shared))


def _share_of_mlp(mlp: MLPConfig, tp: int) -> MLPConfig:
    return replace(mlp, ffn_hidden_size=mlp.ffn_hidden_size // tp)


def held_by_layer(layer: LayerConfig, parallel: ParallelConfig) -> HeldElements:
    """Parameters of one rank's share of a layer."""
    count = count_layer(share_of_layer(layer, parallel))
    mixer, rows = layer.mixer, _shared_rows(layer, parallel)
    elsewhere = rows * (mixer.hidden_size + (isinstance(mixer, AttentionConfig) and mixer.qkv_bias))
    attention = count.total - count.experts - elsewhere + _whole_norms(layer, parallel)
    return HeldElements(attention=attention, expert=count.experts)


def _shared_rows(layer: LayerConfig, parallel: ParallelConfig) -> int:
    """Rows of k and v of `share_of_layer` that other ranks hold: those that share the rank's query group."""
    share = share_of_layer(layer, parallel).mixer
    if not isinstance(share, AttentionConfig) or not isinstance(layer.mixer, AttentionConfig):
        return 0
    return share.qkv_width - layer.mixer.qkv_width // parallel.tp


def _whole_norms(layer: LayerConfig, parallel: ParallelConfig) -> int:
    """Norms over all heads together are whole on every rank, though the heads are not."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionConfig) or mixer.qk_norm != "full":
        return 0
    share = share_of_layer(layer, parallel).mixer
    assert isinstance(share, AttentionConfig)
    return count_norm(mixer.norm, mixer.q_width + mixer.kv_width - share.q_width - share.kv_width)


def held_by_stage(model: ModelConfig, stage: StageLayout, parallel: ParallelConfig) -> HeldElements:
    """Parameters of one rank's share of a stage, with the embedding where tokens enter."""
    layers = Counter(model.layers[index] for index in stage.layers)
    held = sum((held_by_layer(layer, parallel) * count for layer, count in layers.items()), HeldElements())
    hidden, rows = model.hidden_size, model.vocab_size // parallel.tp
    own = held_by_embedding(model, parallel) if stage.embedding else 0
    own += count_norm(model.norm, hidden) if stage.final_norm else 0
    if stage.loss:
        own += (0 if model.tied_embeddings else rows * hidden) + (rows if model.head_bias else 0)
    if stage.num_mtp and model.mtp is not None:
        depths = 1 if model.mtp.repeated_layer else model.mtp.num_layers
        joined = 3 * count_norm(model.norm, hidden) + 2 * hidden * hidden // parallel.tp
        layer = held_by_layer(model.layers[-1], parallel)
        held += HeldElements(attention=depths * (layer.attention + joined), expert=depths * layer.expert)
    return held + HeldElements(attention=own)


def held_by_embedding(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Rows of words, shared out over tp, and of learned positions, which every rank has."""
    positions = model.max_positions if model.position_embedding == "learned_absolute" else 0
    return (model.vocab_size // parallel.tp + positions) * model.hidden_size


def held_by_rank(
    model: ModelConfig, layout: PipelineLayout, pipeline_rank: int, parallel: ParallelConfig
) -> HeldElements:
    """Parameters of a rank: of its chunks, and of a copy of the embedding that its head or look-ahead needs."""
    chunks = layout.chunks(pipeline_rank)
    held = sum((held_by_stage(model, chunk, parallel) for chunk in chunks), HeldElements())
    copied = pipeline_rank in layout.embedding_ranks(tied=model.tied_embeddings)
    if copied and not any(chunk.embedding for chunk in chunks):
        held += HeldElements(attention=held_by_embedding(model, parallel))
    return held


def low_elements(layer: LayerConfig, parallel: ParallelConfig) -> HeldElements:
    """Of `held_by_layer`, the elements of matrices that may be kept in a low format: not norms, router and biases."""
    share = share_of_layer(layer, parallel)
    count: ParamCount = count_layer(share)
    kept = count.norms + count.router
    if isinstance(share.feed_forward, MoEConfig) and share.feed_forward.shared and share.feed_forward.shared.gate:
        kept += share.mixer.hidden_size
    kept += _shared_rows(layer, parallel) * share.mixer.hidden_size
    return HeldElements(attention=count.total - count.experts - kept, expert=count.experts)
