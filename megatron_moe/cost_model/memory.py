"""Peak device memory of every pipeline rank, in closed form.

Excluded: the CUDA context, NCCL buffers, cuBLAS workspaces and allocator fragmentation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import ceil
from operator import add, mul
from typing import NamedTuple

from megatron_moe.config.costs import WHOLE_LAYER, SavedActivation, bytes_per_fp8_element, row_padding_factor
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, PagedStashConfig, RecomputeConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import is_elementwise
from megatron_moe.cost_model.activations import activation_sizes, head_tensors, layer_tensors, stage_tensors
from megatron_moe.cost_model.graph_memory import GraphMemory, SavedBytes, captured_parts, chunks_of_slots
from megatron_moe.cost_model.microbatch_counts import MicrobatchCounts, counts_of, num_simulated_groups, peak_counts
from megatron_moe.cost_model.shards import (
    LocalElements,
    elements_of_rank,
    gathered_elements,
    layer_recipes,
    quantizable_elements,
    rule_state,
    stored_bytes,
    update_workspace,
    uses_low_precision,
)
from megatron_moe.cost_model.state_memory import StateBytes, state_bytes
from megatron_moe.cost_model.workspace import (
    ATTENTION,
    Workspace,
    context_buffer_bytes,
    feed_forward_workspace,
    loss_workspace,
    mixer_workspace,
    receive_buffer_bytes,
    sequence_buffer_bytes,
)
from megatron_moe.pipeline.schedule import computations

_NORMS = ("input_norm", "mlp_norm", "final_norm")
"""Modules whose saved tensors no weight gradient of a GEMM needs."""
LATE = "waiting for weight gradients"
"""Entry in `RankBytes.activations` for tensors that are kept after backward to compute weight gradients later."""


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Memory of one pipeline rank at its peak, in bytes."""

    rank: int
    """Pipeline rank."""
    parameters: LocalElements
    state: StateBytes
    activations: tuple[tuple[str, float], ...]
    """(module, bytes) of the saved activations on the device, over all microbatches in flight."""
    in_flight: int
    """Number of pairs (microbatch, model chunk) whose forward has run and whose backward has not."""
    dispatch: float
    """Buffers of the token dispatcher, for one layer."""
    workspace: float
    """Activation gradients and recomputed activations of one layer. If the loss on this rank needs more memory,
    `workspace` is that of the loss instead, and `dispatch` is 0."""
    receive_slots: float
    """Symmetric memory of the flex dispatcher, allocated for the whole run."""
    sequence_slots: float = 0.0
    """Symmetric memory of `--tp-comm-overlap`, allocated for the whole run."""
    context_slots: float = 0.0
    """Symmetric memory for keys and values of context-parallel ranks, allocated for the whole run."""
    transfers: float
    """Send and receive buffers of pipeline parallelism."""
    graphs: float = 0.0
    """Bytes that the CUDA-graph pools hold beyond `activation_bytes`: the backward workspace of captured modules, the
    forward workspace once per memory slot, and the activations of slots that no microbatch uses at the peak."""
    pools_persist: bool = False
    """Whether the memory of forward and backward stays in a graph pool during the optimizer update."""
    staging: float = 0.0
    """Temporary memory of the update, such as offloaded optimizer state; no activations are allocated then."""
    on_host: float
    """Offloaded activations and host pages of the paged stash, which `total` does not include."""

    @property
    def activation_bytes(self) -> float:
        """Bytes of saved activations on the device."""
        return sum(size for _, size in self.activations)

    @property
    def total(self) -> float:
        """Peak bytes on the device, which are reached in forward and backward or in the optimizer update. Memory in a
        graph pool is allocated in both (`pools_persist`)."""
        training = self.activation_bytes + self.dispatch + self.workspace + self.graphs + self.transfers
        at_peak = training + self.staging if self.pools_persist else max(training, self.staging)
        return self.state.total + self.receive_slots + self.sequence_slots + self.context_slots + at_peak


class _ChunkActivations(NamedTuple):
    """Bytes that one model chunk saves for one microbatch: on the device by module, and in host memory."""

    modules: dict[str, float]
    on_host: float


class _StageBytes(NamedTuple):
    """Sizes that pipeline ranks with equal stages share, in bytes."""

    chunks: list[_ChunkActivations]
    """Activations of each model chunk, before `delta_offload_bytes_across_pp_ranks` is applied."""
    late: list[float]
    """Bytes that each model chunk keeps after the backward of a microbatch for delayed expert weight gradients."""
    growth: list[float]
    """Additional bytes of each model chunk for a microbatch whose weight gradients are deferred."""
    workspace: Workspace
    freed: Mapping[str, float]
    """Bytes of saved activations, by module, that the backward has already freed at the peak."""
    receive_slots: float
    longest: int
    """Number of layers of the largest chunk."""


class _Placed(NamedTuple):
    """Division of a saved tensor's bytes: kept on the device, offloaded to the host, or recomputed in backward."""

    device: float
    host: float = 0.0
    recomputed: float = 0.0


_Pass = tuple[Iterable[LayerConfig], Mapping[str, float], bool]
"""Part of a backward: (layers, bytes per module that are freed before, whether full recompute includes the layers)."""


class RankMemory:
    """Estimates the peak device memory of every pipeline rank of a run."""

    def __init__(self, plan: RunPlan, imbalance: float = 1.0) -> None:
        """`imbalance`: number of expert rows of the most loaded expert-parallel rank, divided by the mean."""
        self.plan = plan
        self.sizes = activation_sizes(plan, imbalance)
        self._alike = _first_alike(plan)
        self._stages: dict[int, _StageBytes] = {}
        self._placed: dict[tuple[LayerConfig, bool], list[_Placed]] = {}
        self._layers: dict[LayerConfig, list[SavedActivation]] = {}
        self._held: dict[int, tuple[LocalElements, LocalElements]] = {}
        self._microbatch_counts: dict[tuple[int, int, int], list[MicrobatchCounts]] = {}
        self._slots: dict[tuple[int, int], list[set[int]]] = {}

    def with_options(self, memory: MemoryConfig) -> "RankMemory":
        """Returns an estimate for the same run with other memory options, reusing cached results."""
        return self.on_another_plan(replace(self.plan, memory=memory))

    def on_another_plan(self, plan: RunPlan) -> "RankMemory":
        """Returns an estimate for a run that differs only in memory options and optimizer, reusing cached results."""
        other = copy(self)
        other.plan, other._stages, other._placed = plan, {}, {}
        return other

    def all_ranks(self) -> list[RankBytes]:
        """Peak memory of every pipeline rank, in order of ranks."""
        return [self.of_rank(rank) for rank in range(self.plan.layout.pp)]

    def of_rank(self, rank: int) -> RankBytes:
        """Peak memory of one pipeline rank."""
        plan, layout = self.plan, self.plan.layout
        own = self._stage_bytes(rank)
        late, workspace = own.late, own.workspace
        chunks = [self._chunk(rank, index) for index in range(layout.vpp)]
        sizes = [sum(chunk.modules.values()) for chunk in chunks]
        in_flight, deferred, delayed = peak_counts(self.microbatch_counts(rank), sizes, own.growth, late)
        modules: dict[str, float] = defaultdict(float)
        for count, waiting, chunk in zip(in_flight, deferred, chunks, strict=True):
            for module, size in chunk.modules.items():
                modules[module] += (count - waiting) * size
        if any(deferred) or any(delayed):
            kept = map(add, sizes, own.growth)
            modules[LATE] = sum(map(mul, deferred, kept)) + sum(map(mul, delayed, late))
        for module, size in own.freed.items():
            modules[module] -= size
        graphs = self._graph_bytes(rank, in_flight)
        return RankBytes(
            rank=rank,
            parameters=self._held_of(rank)[0],
            state=self.state_of_rank(rank),
            activations=tuple(modules.items()),
            in_flight=sum(in_flight),
            dispatch=workspace.dispatch,
            workspace=workspace.other,
            receive_slots=own.receive_slots,
            sequence_slots=sequence_buffer_bytes(plan),
            context_slots=context_buffer_bytes(plan),
            transfers=self._pipeline_buffer_bytes(),
            graphs=graphs,
            pools_persist=plan.cuda_graphs.full_iteration,
            staging=self._staging_bytes(rank),
            on_host=sum(count * chunk.on_host for count, chunk in zip(in_flight, chunks, strict=True))
            + self._host_page_bytes(rank),
        )

    def _growth_of_stage(self, stage: StageLayout, saved: Mapping[str, float], late: float) -> float:
        """Bytes that a stage keeps in addition to those that its forward `saved`, by module, for a microbatch whose
        weight gradients are deferred.

        The operands of the experts' weight gradients (`late`) replace the saved tensors. In other modules, the
        gradients of the outputs are as large as the activations that they replace, the tensors inside attention are
        freed, and recomputed and offloaded tensors are on the device. Overlapped schedules defer only at their end.
        """
        if not self.plan.pipeline.delays_weight_grads(self.plan.layout.pp):
            return 0.0
        needed = RecomputeConfig(recompute_modules=("core_attn",))
        memory = replace(self.plan.memory, recompute=needed, offload=ActivationOffloadConfig())
        unlimited = self.with_options(memory)
        whole = unlimited._activations(stage).modules
        others = [name for name in whole if name not in ("experts", *_NORMS)]
        experts_of_mtp = stage.num_mtp * unlimited._expert_bytes(self.plan.model.mtp_layer)
        replaced = saved.get("experts", 0.0) + experts_of_mtp
        return late - replaced + sum(whole[name] - saved.get(name, 0.0) for name in others)

    def _expert_bytes(self, layer: LayerConfig) -> float:
        """Bytes that the experts of a layer save for one microbatch."""
        placed = zip(self.tensors(layer), self._placed_of(layer), strict=True)
        return sum(size.device for each, size in placed if each.module == "experts")

    def _at_peak(self, rank: int, longest: int, of_mtp: float) -> tuple[Workspace, Mapping[str, float]]:
        """Returns the workspace of a pipeline rank at its peak, and the bytes per module that the backward has freed by
        then.

        The backward runs through the loss, the MTP layers, which save `of_mtp` bytes, and then the decoder layers.
        `longest`: see `_workspace`.
        """
        plan, stages = self.plan, self.plan.layout.chunks(rank)
        freed: dict[str, float] = defaultdict(float)
        candidates = list[tuple[Workspace, Mapping[str, float]]]()
        if any(stage.loss for stage in stages):
            arguments, low = (plan.model, plan.parallel, self.sizes), plan.precision.low_precision
            loss = loss_workspace(*arguments, low)
            if low is not None and low.output_layer:
                loss = loss.plus_bytes(
                    self._transposed_copy_bytes(plan.model.hidden_size * plan.model.vocab_size // plan.parallel.tp)
                )
            candidates.append((loss, {}))
            for each in head_tensors(*arguments):
                freed[each.module] += each.bytes
        decoder = {plan.model.layers[index]: None for stage in stages for index in stage.layers}
        mtp = [plan.model.mtp_layer] if any(stage.num_mtp for stage in stages) else []
        # in an overlapped pair, the forward saves a layer's tensors before the backward has freed those of a layer
        pair = max((self._saved_by(layer) for layer in (*decoder, *mtp)), default=0.0) if plan.pipeline.overlap else 0.0
        before_decoder = freed | ({"mtp": of_mtp} if mtp else {})
        in_blocks = plan.memory.recompute.recompute_method == "block"
        passes: list[_Pass] = [(mtp, dict(freed), not in_blocks)]
        if in_blocks:
            passes += (each for stage in stages for each in self._passes_of_blocks(stage, before_decoder))
        else:
            passes.append((decoder, before_decoder, True))
        for layers, before, recomputed in passes:
            spaces = (self._workspace(layer, longest, recomputed=recomputed)[0] for layer in layers)
            # weight gradients that follow all input gradients need as many bytes, also those of the logits
            kept = plan.pipeline.delays_weight_grads(plan.layout.pp)
            candidates += [(space.plus_bytes(pair), {} if kept else before) for space in spaces]
        return max(candidates, key=lambda at: at[0].total - sum(at[1].values()), default=(Workspace(), {}))

    def _passes_of_blocks(self, stage: StageLayout, before: Mapping[str, float]) -> list[_Pass]:
        """Parts of a stage's backward if its first layers are recomputed by blocks: that of the other layers and, once
        their saved tensors have been freed, that of the first layers. `before`: bytes that are freed earlier."""
        layer_of, number = self.plan.model.layers.__getitem__, self.plan.memory.recompute.recompute_num_layers
        first, others = stage.layers[:number], stage.layers[number:]
        whole, kept = (self._activations(replace(stage, layers=each)).modules for each in (stage.layers, first))
        freed = {name: before.get(name, 0.0) + size - kept.get(name, 0.0) for name, size in whole.items()}
        recomputed = dict.fromkeys(map(layer_of, first)), {**before, **freed}, True
        return [(dict.fromkeys(map(layer_of, others)), before, False), recomputed]

    def _stage_bytes(self, rank: int) -> _StageBytes:
        rank = self._alike[rank]
        if rank not in self._stages:
            stages = self.plan.layout.chunks(rank)
            chunks = list(map(self._activations, stages))
            late = list(map(self._delayed_bytes_of_stage, stages))
            growth = [
                self._growth_of_stage(stage, chunk.modules, delayed)
                for stage, chunk, delayed in zip(stages, chunks, late, strict=True)
            ]
            longest = max(len(stage.layers) for stage in stages)
            of_mtp = max(chunk.modules.get("mtp", 0.0) for chunk in chunks)
            workspace, freed = self._at_peak(rank, longest, of_mtp)
            self._stages[rank] = _StageBytes(
                chunks=chunks,
                late=late,
                growth=growth,
                workspace=workspace,
                freed=freed,
                receive_slots=receive_buffer_bytes(layer_recipes(self.plan, rank), self.plan, self.sizes),
                longest=longest,
            )
        return self._stages[rank]

    def microbatch_counts(self, rank: int) -> list[MicrobatchCounts]:
        """Distinct microbatch counts that occur in the schedule of a pipeline rank. Only a few microbatch groups are
        simulated, because the counts of a long step repeat."""
        interval, count = self.plan.memory.moe_expert_wgrad_interval, self._few_microbatches()
        key = rank, count, interval
        if key not in self._microbatch_counts:
            entries = computations(self.plan.pipeline_schedule(count), rank)
            self._microbatch_counts[key] = counts_of(entries, self.plan.layout.vpp, count, interval)
        return self._microbatch_counts[key]

    def _few_microbatches(self) -> int:
        """Number of microbatches after which the counts of a step repeat."""
        schedule = self.plan.pipeline_schedule(self.plan.num_microbatches)
        groups = num_simulated_groups(self.plan.memory.moe_expert_wgrad_interval)
        return min(schedule.num_microbatches, groups * schedule.group)

    def state_of_rank(self, rank: int) -> StateBytes:
        """Bytes of weights, gradients and optimizer state of one pipeline rank."""
        rules = None if is_elementwise(self.plan.optimizer) else rule_state(self.plan, rank)
        gathered = None if self.plan.data_parallel.fsdp is None else gathered_elements(self.plan, rank)
        return state_bytes(self.plan, *self._held_of(rank), rules, gathered)

    def _held_of(self, rank: int) -> tuple[LocalElements, LocalElements]:
        """Numbers of parameters of a pipeline rank: (all parameters, parameters of FP8 or FP4 GEMMs)."""
        rank = self._alike[rank]
        if rank not in self._held:
            plan = self.plan
            whole = elements_of_rank(plan.model, plan.layout, rank, plan.parallel)
            self._held[rank] = whole, quantizable_elements(plan, rank)
        return self._held[rank]

    def layers_of_chunks(self, rank: int) -> list[list[LayerConfig]]:
        """Layers of each model chunk of a pipeline rank, in order; MTP layers are last in their chunk."""
        model = self.plan.model
        return [
            [*(model.layers[index] for index in stage.layers), *[model.mtp_layer] * stage.num_mtp]
            for stage in self.plan.layout.chunks(rank)
        ]

    def offloaded_bytes_per_microbatch(self, rank: int) -> float:
        """Bytes of activations that a pipeline rank offloads to the host per microbatch, over all its model chunks."""
        return sum(self._chunk(rank, index).on_host for index in range(self.plan.layout.vpp))

    def _host_page_bytes(self, rank: int) -> float:
        """Bytes of the host pages of a pipeline rank's paged stash."""
        stash = self.plan.memory.paged_stash
        if stash is None:
            return 0.0
        rows = sum(width * (num + 1) for width, num in _pages_of_rank(self, rank, host=True).items())
        return rows * stash.moe_paged_stash_page_size * self.sizes.activation_itemsize

    def tensors(self, layer: LayerConfig) -> list[SavedActivation]:
        """Tensors that a layer saves for one microbatch if nothing is recomputed or offloaded."""
        if layer not in self._layers:
            self._layers[layer] = layer_tensors(layer, self.plan.parallel, self.sizes)
        return self._layers[layer]

    def _chunk(self, rank: int, index: int) -> _ChunkActivations:
        chunk = self._stage_bytes(rank).chunks[index]
        kept = min(chunk.on_host, float(self.plan.memory.offload.delta_offload_bytes_across_pp_ranks * rank))
        return _ChunkActivations({**chunk.modules, "not offloaded": kept}, chunk.on_host - kept) if kept else chunk

    def _activations(self, stage: StageLayout) -> _ChunkActivations:
        plan, recompute = self.plan, self.plan.memory.recompute
        saved: list[tuple[SavedActivation, _Placed]] = []
        for place, index in enumerate(stage.layers):
            layer = plan.model.layers[index]
            tensors = list(
                zip(self.tensors(layer), self._placed_of(layer, low=uses_low_precision(plan, index)), strict=True)
            )
            if recompute.recomputes_layer(place):
                # only layer inputs are saved: of every layer, or of the first layer of each recomputed group
                first = recompute.recompute_method == "block" or place % recompute.recompute_num_layers == 0
                tensors = tensors[:1] if first else []
            saved += tensors
        saved += ((each, self._place(each)) for each in stage_tensors(plan.model, stage, plan.parallel, self.sizes))
        modules: dict[str, float] = defaultdict(float)
        on_host = 0.0
        for each, placed in saved:
            modules[each.module] += placed.device
            on_host += placed.host
        return _ChunkActivations(modules, on_host)

    def _placed_of(self, layer: LayerConfig, *, low: bool = True) -> list[_Placed]:
        """Division of the bytes of each of `tensors(layer)`. `low`: whether the layer has FP8 or FP4 GEMMs, if the run
        has any."""
        key = layer, low or self.plan.precision.low_precision is None
        if key not in self._placed:
            tensors = self.tensors(layer)
            if not key[1]:
                tensors = [replace(each, low="", is_activation_input=False) for each in tensors]
            self._placed[key] = list(map(self._place, tensors))
        return self._placed[key]

    def _place(self, tensor: SavedActivation) -> _Placed:
        memory, config, freed_by = self.plan.memory, self.plan.precision.low_precision, self._recomputed_modules()
        if set(tensor.recomputed_by) & set(freed_by):
            return _Placed(0.0, recomputed=tensor.bytes)
        size, in_pages = float(tensor.bytes), memory.paged_stash is not None and tensor.even_rows
        if config is not None and tensor.rows_of_experts is not None:
            config = config.of_experts
        is_fused = tensor.low and config is not None and config.fused_block
        gathers = tensor.gathered_bytes == 0 or (config is not None and not config.weight_grad)
        gathered = tensor.gathered_bytes if gathers and not in_pages else None
        fused_bytes = tensor.fused_bytes if gathered is None else gathered
        if is_fused and fused_bytes is not None:
            size = float(fused_bytes)
        elif config is not None and tensor.is_activation_input and config.activation_inputs:
            size = tensor.elements * bytes_per_fp8_element(config)
        elif config is not None and _is_saved_quantized(config, tensor, freed_by) and not in_pages:
            size = tensor.elements * bytes_per_fp8_element(config)
            if tensor.rows_of_experts is not None:
                size *= row_padding_factor(config, *tensor.rows_of_experts)
        if memory.paged_stash is not None and tensor.even_rows:
            # Rows restored in the experts' backward are not counted: the gradient dispatch before it needs more memory.
            return _Placed(
                size * memory.paged_stash.moe_paged_stash_buffer_size_factor_cuda * tensor.even_bytes / tensor.bytes
            )
        offload = memory.offload
        offloaded = (
            tensor.offloaded_by in offload.offload_modules and tensor.elements >= offload.min_offloaded_tensor_size
        )
        host = size * offload.activation_offload_fraction if offloaded else 0.0
        return _Placed(size - host, host=host)

    def _recomputed_modules(self) -> Sequence[str]:
        recompute = self.plan.memory.recompute
        return (WHOLE_LAYER,) if recompute.recompute_method == "uniform" else recompute.recompute_modules

    def _saved_by(self, layer: LayerConfig) -> float:
        """Bytes that a layer saves for one microbatch, including offloaded tensors and excluding recomputed tensors."""
        return sum(each.device + each.host for each in self._placed_of(layer))

    def _delayed_bytes_of_stage(self, stage: StageLayout) -> float:
        """Bytes that a stage keeps after the backward of a microbatch for delayed expert weight gradients."""
        layers = self.plan.model.layers
        own = sum(
            self._delayed_bytes_of_layer(layers[index], low=uses_low_precision(self.plan, index))
            for index in stage.layers
        )
        mtp = self._delayed_bytes_of_layer(self.plan.model.mtp_layer, low=self.plan.precision.low_precision is not None)
        return own + stage.num_mtp * mtp

    def _delayed_bytes_of_layer(self, layer: LayerConfig, *, low: bool) -> float:
        """Bytes per microbatch that an MoE layer keeps after backward. `low`: whether its GEMMs use FP8 or FP4."""
        config = self.plan.precision.low_precision if low else None
        return layer.feed_forward.delayed_wgrad_bytes(self.plan.parallel, self.sizes, config)

    def _graph_bytes(self, rank: int, in_flight: Sequence[int]) -> float:
        """Memory of the pools of captured modules beyond the activations of the microbatches `in_flight`."""
        if not self.plan.cuda_graphs.cuda_graph_modules:
            return 0.0

        config, freed_by = self.plan.precision.low_precision, self._recomputed_modules()

        def saved_bytes(layer: LayerConfig) -> list[SavedBytes]:
            placed = zip(self.tensors(layer), self._placed_of(layer), strict=True)
            return [
                SavedBytes(each.module, size.device, size.recomputed, _is_saved_quantized(config, each, freed_by))
                for each, size in placed
            ]

        longest = self._stage_bytes(rank).longest
        graphs = GraphMemory(self.plan, self.sizes, saved_bytes, lambda layer: self._workspace(layer, longest)[1])
        # layers of multi-token prediction are not captured
        layers = [[self.plan.model.layers[index] for index in stage.layers] for stage in self.plan.layout.chunks(rank)]
        return graphs.pool_bytes(layers, self._chunks_of_slots(rank), in_flight)

    def _chunks_of_slots(self, rank: int) -> list[set[int]]:
        key = rank, self._few_microbatches()
        if key not in self._slots:
            self._slots[key] = chunks_of_slots(computations(self.plan.pipeline_schedule(key[1]), rank))
        return self._slots[key]

    def _workspace(self, layer: LayerConfig, longest: int, *, recomputed: bool = True) -> tuple[Workspace, float]:
        """Returns the peak temporary memory of a layer's backward, and the part of it that is in a pool of captured
        modules. `longest`: number of layers of the largest model chunk. `recomputed`: whether full recompute includes
        the layer."""
        restored = {True: 0.0, False: 0.0}  # whether part of attention -> recomputed and reloaded bytes
        freed = 0.0  # bytes that the feed-forward part frees before the backward of attention
        for each, placed in zip(self.tensors(layer), self._placed_of(layer), strict=True):
            restored[each.module in ATTENTION] += placed.recomputed + placed.host
            if each.module not in ATTENTION:
                freed += placed.device + placed.recomputed + placed.host
        recompute = self.plan.memory.recompute
        if recompute.recompute_method is not None and recomputed:
            run = max(min(recompute.recompute_num_layers, longest), 1) if recompute.recompute_method == "uniform" else 1
            restored = dict.fromkeys(restored, run * self._saved_by(layer))
        arguments = layer, self.plan.parallel, self.sizes
        low = self.plan.precision.low_precision
        captured = captured_parts(self.plan, layer)
        if captured[0] != captured[1]:
            freed = 0.0  # memory of a pool serves only graphs
        attention = mixer_workspace(*arguments, low).plus_bytes(restored[True] - freed)
        parameters = layer.feed_forward.parameters(self.plan.parallel)
        largest = max((spec.local_numel(self.plan.parallel) for spec in parameters if spec.low), default=0)
        feed_forward = feed_forward_workspace(*arguments, low).plus_bytes(
            restored[False] + self._transposed_copy_bytes(largest)
        )
        parts = list(zip(captured, (attention, feed_forward), strict=True))
        outside = [part for in_graph, part in parts if not in_graph]
        inside = [part.total for in_graph, part in parts if in_graph]
        return max(outside, key=lambda each: each.total, default=Workspace()), max(inside, default=0.0)

    def _transposed_copy_bytes(self, elements: int) -> float:
        """Bytes of the transposed copy of a weight stored in FP8 or FP4, made for an input gradient."""
        if not self.plan.precision.low_precision_params:
            return 0.0
        return elements * stored_bytes(self.plan.precision).transposed

    def _staging_bytes(self, rank: int) -> float:
        """Peak temporary bytes on the device during the update: those of a rule for whole matrices, or offloaded
        state, of which two chunks if it is copied in chunks, and none if the update runs on the CPU."""
        if not is_elementwise(self.plan.optimizer):
            return update_workspace(self.plan, rank)
        offload = self.plan.optimizer.offload
        if offload.cpu_step or not offload.fraction:
            return 0.0
        state = state_bytes(replace(self.plan, memory=MemoryConfig()), *self._held_of(rank))
        offloaded = (state.master + state.moments) * offload.fraction
        return min(offloaded, 2.0 * offload.chunk_bytes) if offload.chunk_bytes else offloaded

    def _pipeline_buffer_bytes(self) -> float:
        """Bytes of pipeline buffers: a send and a receive buffer each for a hidden state and for its gradient."""
        if self.plan.layout.pp == 1:
            return 0.0
        width = self.plan.model.residual.num_streams * self.plan.model.hidden_size
        return 4.0 * self.sizes.residual * width * self.sizes.activation_itemsize


def _first_alike(plan: RunPlan) -> list[int]:
    """Returns for each pipeline rank the first rank with equal stages."""
    kinds = {layer: kind for kind, layer in enumerate(dict.fromkeys(plan.model.layers))}
    kind_of = [(kinds[layer], uses_low_precision(plan, index)) for index, layer in enumerate(plan.model.layers)]
    keys = [
        (stage.embedding, stage.final_norm, stage.num_mtp, stage.loss, *(kind_of[index] for index in stage.layers))
        for stage in plan.layout.stages
    ]
    firsts: dict[object, int] = {}
    return [firsts.setdefault(tuple(keys[rank :: plan.layout.pp]), rank) for rank in range(plan.layout.pp)]


def _is_saved_quantized(config: LowPrecisionConfig | None, tensor: SavedActivation, recomputed: Sequence[str]) -> bool:
    """Whether a tensor is saved in FP8 or FP4 if the modules `recomputed` are recomputed."""
    if config is None or not config.weight_grad or tensor.low not in config.activation_modules:
        return False
    has_one_copy = not tensor.shared or config.fused_block is not None
    return has_one_copy and (not tensor.read_unless or tensor.read_unless in recomputed)


def rank_with_peak_memory(ranks: Sequence[RankBytes]) -> RankBytes:
    """Returns the entry of `ranks` with the highest peak."""
    return max(ranks, key=lambda rank: rank.total)


def pages_of_rank(plan: RunPlan, rank: int, *, host: bool = False) -> dict[int, int]:
    """Row width in elements -> number of paged-stash pages that a pipeline rank needs, on the device or on the host.
    One in-flight tensor needs ceil(rows at an even expert load * buffer size factor / page size) + 1 pages; no host
    pages if their factor is 0."""
    return _pages_of_rank(RankMemory(plan), rank, host=host)


def _pages_of_rank(memory: RankMemory, rank: int, *, host: bool) -> dict[int, int]:
    config = memory.plan.memory.paged_stash
    assert config is not None, "the plan has no paged stash"
    factor = config.moe_paged_stash_buffer_size_factor_cpu if host else config.moe_paged_stash_buffer_size_factor_cuda
    if host and not factor:
        return {}
    chunks = [_pages_of(layers, memory, config, factor) for layers in memory.layers_of_chunks(rank)]
    peak: Counter[int] = Counter()
    for in_flight, *_ in memory.microbatch_counts(rank):
        now: Counter[int] = Counter()
        for count, pages in zip(in_flight, chunks, strict=True):
            now += Counter({width: count * each for width, each in pages.items()})
        peak |= now
    return dict(peak)


def _pages_of(layers: list[LayerConfig], memory: RankMemory, config: PagedStashConfig, factor: float) -> Counter[int]:
    """Row width in elements -> number of paged-stash pages that `layers` need for one microbatch. `factor`: capacity
    divided by the rows of an even expert load."""
    found = Counter[int]()
    recomputed = memory.plan.memory.recompute.recompute_modules
    for tensor in (tensor for layer in layers for tensor in memory.tensors(layer)):
        if tensor.even_rows and not set(tensor.recomputed_by) & set(recomputed):
            rows = factor * tensor.even_rows + tensor.padding_rows
            found[tensor.row_width] += ceil(rows / config.moe_paged_stash_page_size) + 1
    return found
