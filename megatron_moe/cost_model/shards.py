"""Number of parameters on one rank: its shards of the layers, embedding, norms and head of its pipeline stages."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from megatron_moe.config.component import ParamSpec
from megatron_moe.config.costs import CostSum, bytes_per_element
from megatron_moe.config.fsdp import NUM_BUFFERS, unit_of
from megatron_moe.config.matrix_owners import assign_matrices_to_owners, matrix_shape, update_cost
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.parallel import ParallelConfig, default_bucket_size
from megatron_moe.config.param_meta import Grid
from megatron_moe.config.pipeline_layout import PipelineLayout, StageLayout
from megatron_moe.config.precision import WHOLE, LowPrecisionConfig, PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import EqualMatrices, rule_of, spec_of


@dataclass(frozen=True, kw_only=True)
class LocalElements(CostSum[int]):
    """Number of parameters on one rank: routed experts (`expert`) and all others (`attention`)."""

    attention: int = 0
    expert: int = 0


def local_elements(parameters: Iterable[ParamSpec], parallel: ParallelConfig, *, low: bool = False) -> LocalElements:
    """Number of elements of `parameters` on one rank. `low`: only those that FP8 or FP4 recipes may quantise."""
    found = {"attention": 0, "expert": 0}
    for spec in parameters:
        if spec.low or not low:
            found[spec.meta.grid] += spec.local_numel(parallel)
    return LocalElements(**found)


def elements_of_layer(layer: LayerConfig, parallel: ParallelConfig, *, low: bool = False) -> LocalElements:
    """Number of parameters in one rank's shard of a layer. `low`: see `local_elements`."""
    return local_elements(layer.parameters(parallel), parallel, low=low)


def elements_of_stage(model: ModelConfig, stage: StageLayout, parallel: ParallelConfig) -> LocalElements:
    """Number of parameters in one rank's shard of a stage: layers and, if present, embedding, final norm, head and MTP
    layers."""
    layers, ends = Counter(model.layers[index] for index in stage.layers), list[ParamSpec]()
    total = sum((elements_of_layer(layer, parallel) * count for layer, count in layers.items()), LocalElements())
    ends += model.embedding_parameters(parallel) if stage.embedding else ()
    ends += model.final_norm_parameters(parallel) if stage.final_norm else ()
    ends += model.head_parameters() if stage.loss else ()
    if stage.num_mtp and model.mtp is not None:
        total += local_elements(model.mtp_parameters(parallel), parallel) * model.mtp.num_distinct_layers
    return total + local_elements(ends, parallel)


def elements_of_rank(
    model: ModelConfig, layout: PipelineLayout, pipeline_rank: int, parallel: ParallelConfig
) -> LocalElements:
    """Number of parameters on one rank, including the copy of the embedding that a tied head or MTP layers need."""
    chunks = layout.chunks(pipeline_rank)
    total = sum((elements_of_stage(model, chunk, parallel) for chunk in chunks), LocalElements())
    copied = pipeline_rank in layout.embedding_ranks(tied=model.tied_embeddings)
    if copied and not any(chunk.embedding for chunk in chunks):
        total += local_elements(model.embedding_parameters(parallel), parallel)
    return total


def parameters_of_rank(plan: RunPlan, rank: int) -> Iterator[tuple[str, ParamSpec]]:
    """Yields (global name, parameter) of all parameters of a pipeline rank, as `elements_of_rank` counts them."""
    for prefix, part in _parts_of_rank(plan, rank):
        for spec in part.parameters(plan.parallel) if isinstance(part, LayerConfig) else part:
            yield f"{prefix}.{spec.name}", spec


def _parts_of_rank(plan: RunPlan, rank: int) -> Iterator[tuple[str, LayerConfig | Iterable[ParamSpec]]]:
    """Yields (prefix of global names, layer or parameters) of all parts of a pipeline rank, in model order."""
    model, parallel, chunks = plan.model, plan.parallel, plan.layout.chunks(rank)
    copied = rank in plan.layout.embedding_ranks(tied=model.tied_embeddings)
    if copied or any(chunk.embedding for chunk in chunks):
        yield "embedding", model.embedding_parameters(parallel)
    for chunk in chunks:
        yield from ((f"decoder.layers.{index}", model.layers[index]) for index in chunk.layers)
        if chunk.final_norm:
            yield "decoder", model.final_norm_parameters(parallel)
        if chunk.loss:
            yield "output_layer", model.head_parameters()
        if chunk.num_mtp and model.mtp is not None:
            for index in range(model.mtp.num_distinct_layers):
                yield f"mtp.layers.{index}", model.mtp_parameters(parallel)


def unit_sizes(plan: RunPlan, rank: int) -> dict[Grid, dict[str, int]]:
    """Number of elements of every FSDP unit of a pipeline rank, by grid and unit name, in model order."""
    sizes: dict[Grid, Counter[str]] = {"attention": Counter(), "expert": Counter()}
    of_layers: dict[LayerConfig, LocalElements] = {}
    for prefix, part in _parts_of_rank(plan, rank):
        if not isinstance(part, LayerConfig):
            elements = local_elements(part, plan.parallel)
        elif part in of_layers:
            elements = of_layers[part]
        else:
            elements = of_layers[part] = elements_of_layer(part, plan.parallel)
        for grid in sizes:
            if count := elements.expert if grid == "expert" else elements.attention:
                sizes[grid][unit_of(f"{prefix}.", grid)] += count
    return {grid: dict(of_units) for grid, of_units in sizes.items()}


def units_in_turn(plan: RunPlan, units: Iterable[str]) -> list[str]:
    """Those of the FSDP `units` whose weights do not stay in memory for a whole step: all layers, except an MTP layer
    of several depths."""
    repeats_mtp = plan.model.mtp is not None and plan.model.mtp.num_distinct_layers < plan.model.num_mtp
    return [unit for unit in units if "." in unit and not (repeats_mtp and unit.startswith("mtp."))]


class GatheredElements(NamedTuple):
    """Number of elements of sharded parameters that are gathered (unsharded) on one rank at the same time."""

    weights: LocalElements
    """Gathered weights of layers in use, embedding and head."""
    grads: LocalElements
    """Gradients of a microbatch before their reduction."""
    largest: LocalElements
    """Gradients of the largest unit."""


def gathered_elements(plan: RunPlan, rank: int) -> GatheredElements:
    """Sizes, in elements, of the memory into which a pipeline rank gathers sharded weights, and of that in which it
    computes gradients before they are reduced. Embedding, head and an MTP layer of several depths are gathered once per
    step and stay in memory. Of the other layers, two per grid and pass are in memory at a time. With
    `fsdp_double_buffer` and for gradients, layers share buffers of the size of the largest layer that uses them.
    Otherwise the layers are counted that are in memory at the end of a forward, when most activations are saved: the
    last ones and, if the backward of another microbatch overlaps, the first ones.
    """
    config, units = plan.data_parallel.fsdp, unit_sizes(plan, rank)
    assert config is not None, "the run shards no weights or gradients"
    weights, grads, largest = ({"attention": 0, "expert": 0} for _ in range(3))
    for grid, of_grid in units.items():
        sizes = [of_grid[unit] for unit in reversed(units_in_turn(plan, of_grid))]
        ends = sum(of_grid.values()) - sum(sizes)
        buffers = sum(max(sizes[first::NUM_BUFFERS], default=0) for first in range(NUM_BUFFERS))
        grads[grid] = ends + buffers
        largest[grid] = max(of_grid.values(), default=0)
        in_backward = sizes[NUM_BUFFERS:][-NUM_BUFFERS:] if config.num_passes == 2 else []
        in_use = sum((*sizes[:NUM_BUFFERS], *in_backward))
        weights[grid] = ends + (buffers if config.fsdp_double_buffer else in_use)
    return GatheredElements(LocalElements(**weights), LocalElements(**grads), LocalElements(**largest))


class RuleState(NamedTuple):
    """Size of the parameters and of the optimizer state that one GPU updates."""

    elements: float
    moments: float
    """Bytes of the update rules' state, without master weights."""


class _Matrices(NamedTuple):
    """Matrices of one parameter, all of the same shape: the experts of a stack, or a single matrix."""

    unit: str
    """FSDP unit, which forms one bucket; empty if buckets are divided by size."""
    number: int
    cost: int
    elements: int
    num_bytes: float


def rule_state(plan: RunPlan, rank: int) -> RuleState:
    """Share of the GPU of a pipeline rank that stores most state. Matrices are assigned to owners bucket by bucket, or
    unit by unit, as `ParamLayout` does; other parameters are divided evenly."""
    parallel, precision, fsdp = plan.parallel, plan.precision, plan.data_parallel.fsdp
    owners, tp = plan.data_parallel.num_owners(parallel), {"attention": parallel.tp, "expert": parallel.etp}
    matrices: dict[tuple[str, bool, bool, bool], list[_Matrices]] = {}
    total = RuleState(0.0, 0.0)
    for name, spec in reversed(list(parameters_of_rank(plan, rank))):
        rule, held = spec_of(rule_of(name, spec.meta, plan.optimizer)), spec.local_numel(parallel)
        shape, shard, number = _matrices_of(spec, parallel)
        moments = 0
        for state in rule.states(plan.optimizer, precision):
            values = number * state.values_of(*shape) if state.matrix_shape else held
            moments += values * state.num_bytes(precision)
        if rule.alignment == "matrix":
            replicated = spec.meta.tp_dim is None and tp[spec.meta.grid] > 1
            partial = replicated and spec.meta.partial_over_tp
            group = (spec.meta.grid, spec.meta.role == "router", replicated, partial)
            unit = "" if fsdp is None else unit_of(name, spec.meta.grid)
            found = _Matrices(unit, number, update_cost(*shard), held // number, moments / number)
            matrices.setdefault(group, []).append(found)
        else:
            total = _sum(total, RuleState(held / owners[spec.meta.grid], moments / owners[spec.meta.grid]))
    shares = {grid: [RuleState(0.0, 0.0)] * size for grid, size in owners.items()}
    for (grid, *_), group_matrices in matrices.items():
        of_group = _shares(group_matrices, owners[grid], _bucket_size(plan, rank, owners[grid]))
        shares[grid] = [_sum(*pair) for pair in zip(shares[grid], of_group, strict=True)]
    # ranks of a stage: tp ranks, or ep x etp ranks, with different parts of the parameters are adjacent
    own = {
        (rank // parallel.tp % owners["attention"], rank // (parallel.ep * parallel.etp) % owners["expert"])
        for rank in range(parallel.world_size // plan.layout.pp)
    }
    largest = (_sum(shares["attention"][dense], shares["expert"][expert]) for dense, expert in own)
    return _sum(total, max(largest, key=lambda share: share.moments))


def update_workspace(plan: RunPlan, rank: int) -> float:
    """Largest temporary memory in bytes of the updates of whole matrices on a GPU of a pipeline rank, if the equal
    matrices of a bucket are divided evenly among their owners."""
    parallel, owners = plan.parallel, plan.data_parallel.num_owners(plan.parallel)
    numbers = Counter[tuple[str, str, EqualMatrices]]()
    for name, spec in parameters_of_rank(plan, rank):
        rule, of_parameter = rule_of(name, spec.meta, plan.optimizer), _matrices_of(spec, parallel)
        numbers[rule, spec.meta.grid, of_parameter] += of_parameter.number
    found = [0.0]
    for (rule, of_grid, each), total in numbers.items():
        size = _bucket_size(plan, rank, owners[of_grid])
        number = min(total, max(each.number, size // prod(each.shard) + 1))
        owned = each._replace(number=-(-number // owners[of_grid]))
        found.append(spec_of(rule).workspace(plan.optimizer, plan.precision, owned))
    return max(found)


def _matrices_of(spec: ParamSpec, parallel: ParallelConfig) -> EqualMatrices:
    """Matrices of a parameter on one rank."""
    shape = rows, columns = matrix_shape(spec.shape, spec.meta)
    number = 1 if spec.meta.num_experts is None else spec.shape[0] // parallel.ep
    size = spec.local_numel(parallel) // number
    shard = (size // columns, columns) if spec.meta.tp_dim == 0 else (rows, size // rows)
    return EqualMatrices(shape, shard, number)


def _bucket_size(plan: RunPlan, rank: int, num_owners: int) -> int:
    """Number of elements after which `ParamLayout` ends a bucket."""
    config = plan.data_parallel
    if config.ddp_num_buckets is not None:
        return -(-elements_of_rank(plan.model, plan.layout, rank, plan.parallel).total // config.ddp_num_buckets)
    return config.ddp_bucket_size or default_bucket_size(num_owners)


def _shares(matrices: list[_Matrices], num_owners: int, bucket_size: int) -> list[RuleState]:
    loads, shares = [0.0] * num_owners, [RuleState(0.0, 0.0)] * num_owners
    bucket, held = list[_Matrices](), 0
    for index, each in enumerate(matrices, start=1):
        bucket += [each] * each.number
        held += each.number * each.elements
        is_last = index == len(matrices) or matrices[index].unit != each.unit
        if is_last or (not each.unit and held >= bucket_size):
            first = assign_matrices_to_owners([matrix.cost for matrix in bucket], loads)
            for owner, (start, end) in enumerate(pairwise([*first, len(bucket)])):
                for matrix in bucket[start:end]:
                    shares[owner] = _sum(shares[owner], RuleState(matrix.elements, matrix.num_bytes))
            bucket, held = [], 0
    return shares


def _sum(one: RuleState, other: RuleState) -> RuleState:
    return RuleState(one.elements + other.elements, one.moments + other.moments)


def state_values(plan: RunPlan) -> int:
    """Number of values of the update rules' state for the whole model, without master weights."""
    total, seen = 0, set[str]()
    for rank in range(plan.layout.pp):
        for name, spec in parameters_of_rank(plan, rank):
            if name in seen:  # a copy of this parameter on another stage has been counted
                continue
            seen.add(name)
            number = 1 if spec.meta.num_experts is None else spec.shape[0]
            for state in spec_of(rule_of(name, spec.meta, plan.optimizer)).states(plan.optimizer, plan.precision):
                total += (
                    number * state.values_of(*matrix_shape(spec.shape, spec.meta))
                    if state.matrix_shape
                    else spec.elements
                )
    return total


def uses_low_precision(plan: RunPlan, index: int) -> bool:
    """Whether a decoder layer has FP8 or FP4 GEMMs."""
    config = plan.precision.low_precision
    return config is not None and config.covers(index, len(plan.model.layers))


def layer_recipes(plan: RunPlan, rank: int) -> list[tuple[LayerConfig, LowPrecisionConfig | None]]:
    """Layers of a pipeline rank with their FP8 or FP4 recipes, or None; the layers of multi-token prediction come
    last."""
    config, layers, stages = plan.precision.low_precision, plan.model.layers, plan.layout.chunks(rank)
    indices = (index for stage in stages for index in stage.layers)
    own = [(layers[index], config if uses_low_precision(plan, index) else None) for index in indices]
    return own + [(plan.model.mtp_layer, config)] * sum(stage.num_mtp for stage in stages)


def quantizable_elements(plan: RunPlan, rank: int) -> LocalElements:
    """Number of parameters of FP8 or FP4 GEMMs on one GPU of a pipeline rank."""
    config, model, stages = plan.precision.low_precision, plan.model, plan.layout.chunks(rank)
    if config is None:
        return LocalElements()
    depths, layers = sum(stage.num_mtp for stage in stages), layer_recipes(plan, rank)
    num_mtp = 0 if model.mtp is None else min(depths, model.mtp.num_distinct_layers)
    distinct = layers[: len(layers) - depths + num_mtp]  # depths may share one layer
    kinds = Counter(layer for layer, recipe in distinct if recipe is not None).items()
    low = sum((elements_of_layer(layer, plan.parallel, low=True) * count for layer, count in kinds), LocalElements())
    attention = 2 * model.hidden_size**2 // plan.parallel.tp * num_mtp
    if config.output_layer and any(stage.loss for stage in stages):
        attention += model.hidden_size * model.vocab_size // plan.parallel.tp
    return low + LocalElements(attention=attention)


class StoredBytes(NamedTuple):
    """Bytes per weight element with `--fp8-param-gather` or `--fp4-param-gather`."""

    gathered: float
    scales: float
    amax: float
    """Bytes of the block amax values, which ranks reduce in bf16 if the weights are bf16, else in fp32."""

    transposed: float = 1.0
    """Bytes of the transposed copy that an input gradient reads."""

    @property
    def total(self) -> float:
        """Bytes per weight element that every rank stores, without the transposed copy."""
        return self.gathered + self.scales


def stored_bytes(precision: PrecisionConfig) -> StoredBytes:
    """Bytes per element of weights that are stored in the run's FP8 or FP4 recipe. A single scale per matrix is not
    counted."""
    amax = min(4, bytes_per_element(precision.params))
    if precision.low_precision is None:
        return StoredBytes(1.0, 0.0, 0.0)
    fmt = precision.low_precision.weights
    copies = 2 if fmt.block[0] == 1 else 1  # blocks within rows differ between the two directions
    scales = 0.0 if fmt.block == WHOLE else copies / (fmt.block[0] * fmt.block[1])
    return StoredBytes(copies * fmt.bits / 8, copies * fmt.scale_bytes, scales * amax, fmt.bits / 8)
