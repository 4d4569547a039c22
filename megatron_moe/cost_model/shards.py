"""Number of parameters on one rank: its shards of the layers, embedding, norms and head of its pipeline stages."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.costs import CostSum
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import PipelineLayout, StageLayout
from megatron_moe.config.precision import LowPrecisionConfig, PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import num_bytes
from megatron_moe.cost_model.parameters import count_layer, count_norm


@dataclass(frozen=True, kw_only=True)
class HeldElements(CostSum[int]):
    """Number of parameters on one rank: routed experts (`expert`) and all others (`attention`)."""

    attention: int = 0
    expert: int = 0


def held_by_layer(layer: LayerConfig, parallel: ParallelConfig) -> HeldElements:
    """Number of parameters in one rank's shard of a layer."""
    count, mixer = count_layer(layer.shard(parallel)), layer.mixer
    attention = count.total - count.experts
    if isinstance(mixer, AttentionConfig):
        attention -= _kv_rows_elsewhere(layer, parallel.tp) * (mixer.hidden_size + mixer.qkv_bias)
        if mixer.qk_norm == "full":  # replicated, though the heads are sharded
            shard = mixer.shard(parallel.tp)
            attention += count_norm(mixer.norm, mixer.q_width + mixer.kv_width - shard.q_width - shard.kv_width)
    return HeldElements(attention=attention, expert=count.experts)


def _kv_rows_elsewhere(layer: LayerConfig, tp: int) -> int:
    """Number of k and v weight rows that a rank uses but does not store, because several ranks share a query group."""
    mixer = layer.mixer
    return mixer.shard(tp).qkv_width - mixer.qkv_width // tp if isinstance(mixer, AttentionConfig) else 0


def held_by_stage(model: ModelConfig, stage: StageLayout, parallel: ParallelConfig) -> HeldElements:
    """Number of parameters in one rank's shard of a stage: layers and, if present, embedding, final norm and head."""
    layers = Counter(model.layers[index] for index in stage.layers)
    held = sum((held_by_layer(layer, parallel) * count for layer, count in layers.items()), HeldElements())
    hidden, rows = model.hidden_size, model.vocab_size // parallel.tp
    own = held_by_embedding(model, parallel) if stage.embedding else 0
    own += count_norm(model.norm, hidden) if stage.final_norm else 0
    if stage.loss:
        own += (0 if model.tied_embeddings else rows * hidden) + (rows if model.head_bias else 0)
    if stage.num_mtp and model.mtp is not None:
        projection = 3 * count_norm(model.norm, hidden) + 2 * hidden * hidden // parallel.tp
        layer = held_by_layer(model.layers[-1], parallel) + HeldElements(attention=projection)
        held += layer * model.mtp.num_distinct_layers
    return held + HeldElements(attention=own)


def held_by_embedding(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Number of parameters on one rank: word embedding, sharded over tp, and position embedding, replicated."""
    positions = model.max_positions if model.position_embedding == "learned_absolute" else 0
    return (model.vocab_size // parallel.tp + positions) * model.hidden_size


def held_by_rank(
    model: ModelConfig, layout: PipelineLayout, pipeline_rank: int, parallel: ParallelConfig
) -> HeldElements:
    """Number of parameters on one rank, including the copy of the embedding that a tied head or MTP layers need."""
    chunks = layout.chunks(pipeline_rank)
    held = sum((held_by_stage(model, chunk, parallel) for chunk in chunks), HeldElements())
    copied = pipeline_rank in layout.embedding_ranks(tied=model.tied_embeddings)
    if copied and not any(chunk.embedding for chunk in chunks):
        held += HeldElements(attention=held_by_embedding(model, parallel))
    return held


def is_low(plan: RunPlan, index: int) -> bool:
    """Whether a decoder layer has FP8 or FP4 GEMMs."""
    config = plan.precision.low_precision
    return config is not None and config.covers(index, len(plan.model.layers))


def layer_recipes(plan: RunPlan, rank: int) -> list[tuple[LayerConfig, LowPrecisionConfig | None]]:
    """Layers of a pipeline rank with their FP8 or FP4 recipes, last those of multi-token prediction."""
    config, layers, stages = plan.precision.low_precision, plan.model.layers, plan.layout.chunks(rank)
    indices = (index for stage in stages for index in stage.layers)
    own = [(layers[index], config if is_low(plan, index) else None) for index in indices]
    return own + [(layers[-1], config)] * sum(stage.num_mtp for stage in stages)


def low_by_rank(plan: RunPlan, rank: int) -> HeldElements:
    """Number of parameters of FP8 or FP4 GEMMs on one GPU of a pipeline rank."""
    config, model, stages = plan.precision.low_precision, plan.model, plan.layout.chunks(rank)
    if config is None:
        return HeldElements()
    num_mtp = sum(stage.num_mtp for stage in stages)
    kinds = Counter(layer for layer, recipe in layer_recipes(plan, rank) if recipe is not None).items()
    low = sum((low_elements(layer, plan.parallel) * count for layer, count in kinds), HeldElements())
    attention = 2 * model.hidden_size**2 // plan.parallel.tp * num_mtp
    if config.output_layer and any(stage.loss for stage in stages):
        attention += model.hidden_size * model.vocab_size // plan.parallel.tp
    return low + HeldElements(attention=attention)


class StoredBytes(NamedTuple):
    """Bytes per weight element with `--fp8-param-gather` or `--fp4-param-gather`."""

    gathered: float
    scales: float
    amax: float
    """Largest magnitudes, which ranks reduce in bf16 if the weights are bf16, else in fp32."""

    transposed: float = 1.0
    """Bytes of the transposed copy that an input gradient reads."""

    @property
    def total(self) -> float:
        """Bytes that every rank stores."""
        return self.gathered + self.scales


def stored_bytes(precision: PrecisionConfig) -> StoredBytes:
    """Storage of weights for the run's recipe; one scale per matrix counts as nothing."""
    amax = min(4, num_bytes(precision.params))
    match precision.recipe:
        case "blockwise":
            return StoredBytes(1.0, 4 / 128**2, amax / 128**2)
        case "mxfp8":  # a copy for each direction
            return StoredBytes(2.0, 2 / 32, 2 * amax / 32)
        case "nvfp4":
            return StoredBytes(0.5, 1 / 16**2, amax / 16**2, 0.5)
        case _:
            return StoredBytes(1.0, 0.0, 0.0)


def low_elements(layer: LayerConfig, parallel: ParallelConfig) -> HeldElements:
    """Number of one rank's parameters that FP8 or FP4 recipes may quantize: all but norms, router and shared gate."""
    shard = layer.shard(parallel)
    count, hidden = count_layer(shard), shard.mixer.hidden_size
    high = count.norms + count.router + _kv_rows_elsewhere(layer, parallel.tp) * hidden
    if isinstance(shard.feed_forward, MoEConfig) and shard.feed_forward.shared and shard.feed_forward.shared.gate:
        high += hidden
    return HeldElements(attention=count.total - count.experts - high, expert=count.experts)
