"""Bytes on the device, in closed form: what every pipeline rank of a plan holds at its fullest moment.

Not in it: the CUDA context, NCCL's own buffers, cuBLAS workspaces and what the allocator cannot use.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import mul

from megatron_moe.config.memory import (
    ActivationOffloadConfig,
    MemoryConfig,
    RecomputeConfig,
)
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.precision import LowPrecision, PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import (
    WHOLE_LAYER,
    ActivationSizes,
    KeptTensor,
    expert_rows,
    layer_tensors,
    num_bytes,
    stage_tensors,
)
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.cost_model.shards import (
    HeldElements,
    held_by_rank,
    low_elements,
    share_of_layer,
)
from megatron_moe.cost_model.workspace import (
    ATTENTION,
    Workspace,
    in_attention,
    in_feed_forward,
    in_loss,
)
from megatron_moe.pipeline.actions import Entry, parts
from megatron_moe.pipeline.schedule import computations

_FEW_GROUPS = 4
"""Groups of microbatches after which a schedule repeats itself."""
LATE = "waiting for weight gradients"
"""Rows of experts and their gradients, behind the backward of their microbatch."""
Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""By chunk: microbatches in flight, and those behind their backward whose rows wait for weight gradients of experts."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What stays from step to step."""

    weights: float
    gradients: float
    master: float
    """Weights of higher precision, of which ZeRO-1 leaves each rank a share."""
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """One pipeline rank at its fullest moment."""

    rank: int
    """Pipeline rank."""
    held: HeldElements
    state: StateBytes
    activations: tuple[tuple[str, float], ...]
    """(module, bytes) of all microbatches that wait for their backward."""
    in_flight: int
    """(microbatch, chunk) pairs then."""
    dispatch: float
    """Rows on their way to experts and back, of one layer."""
    working: float
    """Gradients of activations, and what is computed again, of the layer at work; or the gradient of the logits, where
    the loss is and that is more. The two are never there together, and rows are on their way only beside the first."""
    transfers: float
    """Hidden states and gradients that travel between pipeline ranks."""
    visiting: float = 0.0
    """Optimizer state that comes from the host for the update, when no activation is there any more."""
    on_host: float
    """Moved to host memory; not part of the total."""

    @property
    def kept(self) -> float:
        """Activations of all modules."""
        return sum(size for _, size in self.activations)

    @property
    def total(self) -> float:
        """At its fullest: where activations are most, or in the update if more state visits the device then."""
        return self.state.total + max(self.kept + self.dispatch + self.working + self.transfers, self.visiting)


def state_bytes(plan: RunPlan, held: HeldElements, low: HeldElements) -> StateBytes:
    """Weights and gradients of all parameters, and this rank's share of what the optimizer keeps.

    With d copies of a parameter, bf16 weights, fp32 gradients, master weights and moments: 6 + 12 / d bytes each.
    """
    precision, parallel = plan.precision, plan.parallel
    sharded = plan.data_parallel.sharded_optimizer
    owners = (parallel.dp * parallel.cp, parallel.edp) if sharded else (1, 1)
    owned = held.attention / owners[0] + held.expert / owners[1]
    stays = 1 - plan.memory.offload.optimizer_fraction
    copy = precision.params != precision.master
    weight = num_bytes(precision.params)
    weights = float(held.total * weight)
    if precision.low and precision.low_params:
        weights -= low.total * (weight - _low_weight(precision))
    return StateBytes(
        weights=weights,
        gradients=held.total * num_bytes(precision.grads),
        master=owned * _master(precision) * stays if copy else 0.0,
        moments=owned * _moments(precision) * stays,
    )


def _master(precision: PrecisionConfig) -> int:
    """Bytes of a master weight, or of the 16 bits that its bf16 parameter does not have."""
    return 2 if precision.remainders else num_bytes(precision.master)


def _moments(precision: PrecisionConfig) -> int:
    if precision.master == "fp64":
        return 16
    return num_bytes(precision.exp_avg) + num_bytes(precision.exp_avg_sq)


def _low_weight(precision: PrecisionConfig) -> float:
    """Bytes of a weight that is kept in a low format. MXFP8 and NVFP4 scale rows and columns apart: two copies."""
    match precision.low:
        case "mxfp8":
            return 2 * (1 + 1 / 32)
        case "nvfp4":
            return 2 * (0.5 + 1 / 16)
        case _:
            return 1 + 4 / 128**2


def _low_activation(recipe: LowPrecision) -> float:
    """Bytes of a matrix's input in a low format with its scales, rounded once."""
    match recipe:
        case "blockwise":
            return 1 + 4 / 128
        case "mxfp8":
            return 1 + 1 / 32
        case "nvfp4":
            return 0.5 + 1 / 16
        case _:
            return 1.0


@dataclass
class _Chunk:
    """What one microbatch in one chunk leaves on the device, by module; and in host memory."""

    modules: dict[str, float]
    on_host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.modules.values())


@dataclass(frozen=True)
class _Remains:
    """What is left of a saved tensor."""

    module: str
    device: float
    host: float = 0.0
    again: float = 0.0
    """Computed again in the backward."""


class RankMemory:
    """Bytes of the ranks of a plan."""

    def __init__(self, plan: RunPlan, imbalance: float = 1.0) -> None:
        """`imbalance`: rows of the fullest rank's experts, as a multiple of the mean."""
        self.plan = plan
        micro, seq = plan.batch.micro, plan.data.seq_length
        self.sizes = ActivationSizes.of(plan.parallel, plan.precision, micro=micro, seq_length=seq, imbalance=imbalance)
        self._layers: dict[LayerConfig, list[KeptTensor]] = {}
        self._held: dict[int, tuple[HeldElements, HeldElements]] = {}
        self._moments: dict[tuple[int, int, int], list[Moment]] = {}

    def with_switches(self, memory: MemoryConfig) -> "RankMemory":
        """Of the same plan with other trades of memory against time; what they do not change is not counted again."""
        return self.on_another_plan(replace(self.plan, memory=memory))

    def on_another_plan(self, plan: RunPlan) -> "RankMemory":
        """Of a plan with the same model, layout and batch, but other memory switches or another optimizer."""
        other = RankMemory(plan, self.sizes.imbalance)
        other._layers, other._held, other._moments = self._layers, self._held, self._moments
        return other

    def all_ranks(self, num_microbatches: int) -> list[RankBytes]:
        """Every pipeline rank."""
        return [self.of_rank(rank, num_microbatches) for rank in range(self.plan.layout.pp)]

    def of_rank(self, rank: int, num_microbatches: int) -> RankBytes:
        """One pipeline rank."""
        plan, layout = self.plan, self.plan.layout
        stages, layers = layout.chunks(rank), self._layers_of(rank)
        chunks = [self._chunk(rank, index) for index in range(layout.vpp)]
        late = [sum(map(self._late, of_chunk)) for of_chunk in self.layers_of_chunks(rank)]
        fullest, waiting = _fullest(self.moments(rank, num_microbatches), [chunk.total for chunk in chunks], late)
        modules: dict[str, float] = {}
        for count, chunk in zip(fullest, chunks, strict=True):
            for module, size in chunk.modules.items():
                modules[module] = modules.get(module, 0.0) + count * size
        if any(waiting):
            modules[LATE] = sum(map(mul, waiting, late))
        longest = max(len(stage.layers) for stage in stages)
        moments = [self._at_work(layer, longest) for layer in dict.fromkeys(layers)]
        if any(stage.loss for stage in stages):
            moments.append(in_loss(plan.model, plan.parallel, self.sizes))
        at_work = max(moments, key=lambda moment: moment.total, default=Workspace())
        if plan.pipeline.overlap:
            # a pair keeps a layer more than a chunk: that of the forward while the same one's backward is not over
            at_work = at_work.and_more(max((self._left(layer) for layer in set(layers)), default=0.0))
        return RankBytes(
            rank=rank,
            held=self.held(rank),
            state=self.state_of_rank(rank),
            activations=tuple(modules.items()),
            in_flight=sum(fullest),
            dispatch=at_work.dispatch,
            working=at_work.other,
            transfers=self._transfers(),
            visiting=self._visiting(rank),
            on_host=sum(count * chunk.on_host for count, chunk in zip(fullest, chunks, strict=True)),
        )

    def moments(self, rank: int, num_microbatches: int) -> list[Moment]:
        """What waits after every computation of a pipeline rank, each set of numbers once. Of a few groups of
        microbatches: the rest of a long step repeats itself."""
        interval = self.plan.memory.expert_wgrad_interval
        group = self.plan.schedule(num_microbatches).group
        several = min(num_microbatches, groups_of_moments(interval) * group)
        known = rank, several, interval
        if known not in self._moments:
            entries = computations(self.plan.schedule(several), rank)
            self._moments[known] = _moments_of(entries, self.plan.layout.vpp, several, interval)
        return self._moments[known]

    def state_of_rank(self, rank: int) -> StateBytes:
        """Weights, gradients and optimizer of one pipeline rank."""
        return state_bytes(self.plan, *self._held_of(rank))

    def held(self, rank: int) -> HeldElements:
        """Parameters of one pipeline rank."""
        return self._held_of(rank)[0]

    def _held_of(self, rank: int) -> tuple[HeldElements, HeldElements]:
        """(all parameters, those in a low format)."""
        if rank not in self._held:
            plan, low = self.plan, HeldElements()
            if plan.precision.low and plan.precision.low_params:
                kinds = Counter(self._layers_of(rank)).items()
                low = sum((low_elements(layer, plan.parallel) * count for layer, count in kinds), low)
            self._held[rank] = held_by_rank(plan.model, plan.layout, rank, plan.parallel), low
        return self._held[rank]

    def _layers_of(self, rank: int) -> list[LayerConfig]:
        """Of all chunks."""
        return [layer for layers in self.layers_of_chunks(rank) for layer in layers]

    def layers_of_chunks(self, rank: int) -> list[list[LayerConfig]]:
        """Of every chunk, those of multi-token prediction at its end."""
        model = self.plan.model
        return [
            [*(model.layers[index] for index in stage.layers), *[model.layers[-1]] * stage.num_mtp]
            for stage in self.plan.layout.chunks(rank)
        ]

    def moved_per_microbatch(self, rank: int) -> float:
        """Bytes of activations that travel to host memory, of all chunks of a pipeline rank."""
        return sum(self._chunk(rank, index).on_host for index in range(self.plan.layout.vpp))

    def tensors(self, layer: LayerConfig) -> list[KeptTensor]:
        """What a layer keeps of a microbatch before anything is recomputed or moved."""
        if layer not in self._layers:
            self._layers[layer] = layer_tensors(layer, self.plan.parallel, self.sizes)
        return self._layers[layer]

    def _chunk(self, rank: int, index: int) -> _Chunk:
        plan = self.plan
        stage = plan.layout.chunks(rank)[index]
        chunk = _Chunk({})
        for place, layer in enumerate(stage.layers):
            whole = _recomputes_whole(plan.memory.recompute, place)
            tensors = self.tensors(plan.model.layers[layer])
            self._add(chunk, self._input(tensors, plan.memory.recompute, place) if whole else tensors)
        self._add(chunk, stage_tensors(plan.model, stage, plan.parallel, self.sizes))
        stays = min(chunk.on_host, float(plan.memory.offload.stay_bytes_per_stage * rank))
        if stays:
            chunk.modules["not moved"] = stays
            chunk.on_host -= stays
        return chunk

    def _input(self, tensors: list[KeptTensor], recompute: RecomputeConfig, place: int) -> list[KeptTensor]:
        """A layer that is computed again keeps its input; of a run of such layers the first does."""
        first = recompute.method == "block" or place % recompute.num_layers == 0
        return [each for each in tensors if first and (each.module, each.name) == ("input_norm", "input")]

    def _add(self, chunk: _Chunk, tensors: Iterable[KeptTensor]) -> None:
        for each in tensors:
            left = self._remains(each)
            chunk.modules[left.module] = chunk.modules.get(left.module, 0.0) + left.device
            chunk.on_host += left.host

    def _remains(self, kept: KeptTensor) -> _Remains:
        memory, precision = self.plan.memory, self.plan.precision
        if memory.recompute.granularity == "selective" and set(kept.forgotten) & set(memory.recompute.modules):
            return _Remains(kept.module, 0.0, again=kept.bytes)
        if memory.recompute.granularity == "full" and memory.recompute.method == "uniform":
            if WHOLE_LAYER in kept.forgotten:
                return _Remains(kept.module, 0.0, again=kept.bytes)
        size = float(kept.bytes)
        if kept.low and precision.low:
            size = kept.elements * _low_activation(precision.low)
        if memory.stash is not None and kept.fair_bytes:
            # they come back when no rows travel, and are less than rows that do
            return _Remains(kept.module, size * memory.stash.factor * kept.fair_bytes / kept.bytes)
        moved = size * memory.offload.fraction if _moves(kept, memory.offload) else 0.0
        return _Remains(kept.module, size - moved, host=moved)

    def _left(self, layer: LayerConfig) -> float:
        """What a layer keeps, before any of it has left for the host."""
        left = [self._remains(each) for each in self.tensors(layer)]
        return sum(each.device + each.host for each in left)

    def _late(self, layer: LayerConfig) -> float:
        """What a layer with experts keeps for its weight gradients behind the backward of a microbatch."""
        feed_forward = share_of_layer(layer, self.plan.parallel).feed_forward
        if not isinstance(feed_forward, MoEConfig):
            return 0.0
        experts = feed_forward.experts
        rows = expert_rows(feed_forward, self.plan.parallel, self.sizes.residual, self.sizes.imbalance)
        # inputs of both products and gradients of both results
        width = 2 * experts.hidden_size + (1 + experts.activation.fan) * experts.ffn_hidden_size
        return rows * width * self.sizes.activation

    def _at_work(self, layer: LayerConfig, longest: int) -> Workspace:
        """The fuller of the two parts of a layer, of which a chunk has no more than `longest`."""
        parts: dict[bool, float] = {True: 0.0, False: 0.0}
        """Of attention and of the feed-forward part: what is computed again for it or comes back from the host."""
        gone = 0.0
        for each in self.tensors(layer):
            left = self._remains(each)
            parts[each.module in ATTENTION] += left.again + left.host
            if each.module not in ATTENTION:
                gone += left.device + left.again + left.host
        recompute, run = self.plan.memory.recompute, 1
        if recompute.granularity == "full":
            run = max(min(recompute.num_layers, longest), 1) if recompute.method == "uniform" else 1
            again = run * float(sum(each.bytes for each in self.tensors(layer)))
            parts = {True: again, False: again}
        known = layer, self.plan.parallel, self.sizes
        first = in_feed_forward(*known).and_more(parts[False])
        last = in_attention(*known).and_more(parts[True] - gone)
        return max(first, last, key=lambda moment: moment.total)

    def _visiting(self, rank: int) -> float:
        """State that waits on the host between updates and comes for one: all of it, or two chunks at a time."""
        offload = self.plan.optimizer.offload
        if offload.host_steps or not offload.fraction:
            return 0.0
        everything = replace(self.plan, memory=MemoryConfig())
        whole = state_bytes(everything, self.held(rank), HeldElements())
        away = (whole.master + whole.moments) * offload.fraction
        return min(away, 2.0 * offload.chunk_bytes) if offload.chunk_bytes else away

    def _transfers(self) -> float:
        """One hidden state on its way in and one on its way out, in either direction."""
        if self.plan.layout.pp == 1:
            return 0.0
        return 4.0 * self.sizes.residual * self.plan.model.hidden_size * self.sizes.activation


def _recomputes_whole(recompute: RecomputeConfig, place: int) -> bool:
    """Is the layer at this place of its stage computed again as a whole?"""
    if recompute.granularity != "full":
        return False
    return recompute.method == "uniform" or place < recompute.num_layers


def _moves(kept: KeptTensor, offload: ActivationOffloadConfig) -> bool:
    return kept.moves in offload.modules and kept.elements >= offload.min_elements


def groups_of_moments(interval: int) -> int:
    """Groups of microbatches of which `RankMemory.moments` follows every computation."""
    return _FEW_GROUPS + interval - 1


def _moments_of(entries: Iterable[Entry], num_chunks: int, num_microbatches: int, interval: int) -> list[Moment]:
    """What waits after every entry, in order, each set of numbers once. In a pair what one microbatch takes layer by
    layer the other one gives back. Weight gradients of experts wait until they are `interval`, or the step's last."""
    now, done = [0] * num_chunks, [0] * num_chunks
    found: dict[Moment, None] = {}
    for entry in entries:
        for action in parts(entry):
            if action.kind == "forward":
                now[action.chunk] += 1
            elif action.kind in ("backward", "backward_weight"):
                now[action.chunk] -= 1
                done[action.chunk] += 1
        late = tuple(0 if count == num_microbatches else count % interval for count in done)
        found[tuple(now), late] = None
    return list(found)


def _fullest(moments: Iterable[Moment], chunks: Sequence[float], late: Sequence[float]) -> Moment:
    """The moment at which most waits; of every chunk what one microbatch leaves in flight, and what behind it."""
    return max(moments, key=lambda at: sum(map(mul, at[0], chunks)) + sum(map(mul, at[1], late)))


def heaviest(ranks: Sequence[RankBytes]) -> RankBytes:
    """The rank that needs most."""
    return max(ranks, key=lambda rank: rank.total)


def state_table(state: StateBytes) -> list[tuple[str, float]]:
    """(name, bytes) of every kind of state."""
    return [(entry.name, getattr(state, entry.name)) for entry in fields(StateBytes)]


def checkpoint_bytes(plan: RunPlan) -> int:
    """Bytes of the weights in one checkpoint and, if it has them, of the optimizer's state. State in narrow formats is
    saved in fp32; buffers, at most a few numbers per expert, are left out."""
    precision = plan.precision
    wide = max(num_bytes("fp32"), num_bytes(precision.master))
    copies = 2 if precision.master == precision.params else 3
    state = copies * wide if plan.checkpoint.save_optim else 0
    return count_parameters(plan.model).total * (num_bytes(precision.params) + state)
