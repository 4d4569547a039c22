"""Number of parameters on one rank: its shards of the layers, embedding, norms and head of its pipeline stages."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_moe.config.component import ParamSpec
from megatron_moe.config.costs import CostSum, num_bytes
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import PipelineLayout, StageLayout
from megatron_moe.config.precision import WHOLE, LowPrecisionConfig, PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import rule_of, spec_of


@dataclass(frozen=True, kw_only=True)
class HeldElements(CostSum[int]):
    """Number of parameters on one rank: routed experts (`expert`) and all others (`attention`)."""

    attention: int = 0
    expert: int = 0


def held(parameters: Iterable[ParamSpec], parallel: ParallelConfig, *, low: bool = False) -> HeldElements:
    """Number of elements of `parameters` on one rank. `low`: only those that FP8 or FP4 recipes may quantise."""
    found = {"attention": 0, "expert": 0}
    for spec in parameters:
        if spec.low or not low:
            found[spec.meta.grid] += spec.held(parallel)
    return HeldElements(**found)


def held_by_layer(layer: LayerConfig, parallel: ParallelConfig, *, low: bool = False) -> HeldElements:
    """Number of parameters in one rank's shard of a layer. `low`: see `held`."""
    return held(layer.parameters(parallel), parallel, low=low)


def held_by_stage(model: ModelConfig, stage: StageLayout, parallel: ParallelConfig) -> HeldElements:
    """Number of parameters in one rank's shard of a stage: layers and, if present, embedding, final norm and head."""
    layers, ends = Counter(model.layers[index] for index in stage.layers), list[ParamSpec]()
    total = sum((held_by_layer(layer, parallel) * count for layer, count in layers.items()), HeldElements())
    ends += model.embedding_parameters(parallel) if stage.embedding else ()
    ends += model.final_norm_parameters(parallel) if stage.final_norm else ()
    ends += model.head_parameters() if stage.loss else ()
    if stage.num_mtp and model.mtp is not None:
        total += held(model.mtp_parameters(parallel), parallel) * model.mtp.num_distinct_layers
    return total + held(ends, parallel)


def held_by_rank(
    model: ModelConfig, layout: PipelineLayout, pipeline_rank: int, parallel: ParallelConfig
) -> HeldElements:
    """Number of parameters on one rank, including the copy of the embedding that a tied head or MTP layers need."""
    chunks = layout.chunks(pipeline_rank)
    total = sum((held_by_stage(model, chunk, parallel) for chunk in chunks), HeldElements())
    copied = pipeline_rank in layout.embedding_ranks(tied=model.tied_embeddings)
    if copied and not any(chunk.embedding for chunk in chunks):
        total += held(model.embedding_parameters(parallel), parallel)
    return total


def parameters_of_rank(plan: RunPlan, rank: int) -> Iterator[tuple[str, ParamSpec]]:
    """Yields (global name, parameter) of all parameters of a pipeline rank, as `held_by_rank` counts them."""
    model, parallel, chunks = plan.model, plan.parallel, plan.layout.chunks(rank)
    copied = rank in plan.layout.embedding_ranks(tied=model.tied_embeddings)
    groups: list[tuple[str, Iterable[ParamSpec]]] = []
    if copied or any(chunk.embedding for chunk in chunks):
        groups.append(("embedding", model.embedding_parameters(parallel)))
    for chunk in chunks:
        groups += [(f"decoder.layers.{index}", model.layers[index].parameters(parallel)) for index in chunk.layers]
        groups += [("decoder", model.final_norm_parameters(parallel))] if chunk.final_norm else []
        groups += [("output_layer", model.head_parameters())] if chunk.loss else []
        depths = range(model.mtp.num_distinct_layers) if chunk.num_mtp and model.mtp is not None else ()
        groups += [(f"mtp.layers.{index}", model.mtp_parameters(parallel)) for index in depths]
    for prefix, parameters in groups:
        for spec in parameters:
            yield f"{prefix}.{spec.name}", spec


def rule_state_bytes(plan: RunPlan, rank: int) -> float:
    """Bytes of the state of update rules on one GPU of a pipeline rank, without master weights. Whole matrices count as
    if they were divided evenly among their owners."""
    parallel, precision = plan.parallel, plan.precision
    sharded = plan.data_parallel.use_distributed_optimizer
    owners = {"attention": parallel.dp * parallel.cp, "expert": parallel.edp} if sharded else {}
    total = 0.0
    for name, spec in parameters_of_rank(plan, rank):
        rule, held = spec_of(rule_of(name, spec.meta, plan.optimizer)), spec.held(parallel)
        matrix = spec.shape if spec.meta.num_experts is None else spec.shape[1:]
        rows, columns = (1, *matrix)[-2:]
        num_matrices = 1 if spec.meta.num_experts is None else spec.shape[0] // parallel.ep
        for state in rule.states(plan.optimizer, precision):
            values = num_matrices * state.values_of(rows, columns) if state.matrix_shape else held
            total += values * state.num_bytes(precision) / owners.get(spec.meta.grid, 1)
    return total


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
    low = sum((held_by_layer(layer, plan.parallel, low=True) * count for layer, count in kinds), HeldElements())
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
    if precision.low_precision is None:
        return StoredBytes(1.0, 0.0, 0.0)
    form = precision.low_precision.weights
    copies = 2 if form.block[0] == 1 else 1  # blocks in rows differ for each direction
    scales = 0.0 if form.block == WHOLE else copies / (form.block[0] * form.block[1])
    return StoredBytes(copies * form.bits / 8, copies * form.scale_bytes, scales * amax, form.bits / 8)
