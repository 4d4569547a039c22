"""Shards of the weights and gradients of units (ZeRO-2 and ZeRO-3), and the reduction of gradients per microbatch.

A rank permanently stores its shard of every unit: weights in their storage format, gradients in the dtype in which they
are accumulated. All weights of a unit are in memory only while it is used (`optim/unit_store.py`), and all gradients
from their computation in a microbatch to their reduction, in the dtype in which they are reduced. Layers share two
buffers for dense and two for expert parameters, which they use in turn. Embedding, head and layers that run several
times have their own buffers. A unit whose data-parallel group has one rank, e.g. experts that exist on one rank only,
is not sharded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.config.fsdp import MOST_RECEIVE_BYTES, NUM_BUFFERS, FSDPConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.param_meta import Grid
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.grad_buffers import FlatBuffer, InitialValues, Sharding, none_if_equal, replica_group_name
from megatron_moe.optim.grad_reduce import GradBucket, GradReducer
from megatron_moe.optim.param_layout import BufferKey, BufferLayout, ParamLayout, Range
from megatron_moe.parallel.collectives import (
    Sizes,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
    start_reduce_scatters_,
)
from megatron_moe.parallel.context import ParallelContext, ProcessGroup, torch_dtype
from megatron_moe.parallel.parameter import Parameter, WeightGradQueue, store
from megatron_moe.parallel.peer_reduce import PeerReduce, Round, receive_slot_bytes
from megatron_moe.parallel.shared_shards import SharedRegion, SharedShards, aligned_bytes, can_share, sharing_problem
from megatron_moe.parallel.streams import Event, make_streams

Spec = tuple[int, torch.dtype]
"""Number of elements and dtype of a flat tensor."""


class UnitMemory:
    """Memory of all weights, or all gradients, of one unit, or of several units that use the memory in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.unit = ""
        """Unit whose weights or gradients the memory contains; empty if the contents are not valid."""
        self.last_use: Event = None
        """Event that completes with the last use of these weights or gradients."""

    def views(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Views of consecutive flat tensors. The memory must be allocated."""
        found, start = [], 0
        for size, dtype in specs:
            found.append(self._bytes[start : start + size * dtype.itemsize].view(dtype))
            start += aligned_num_bytes([(size, dtype)])
        return found

    def allocate(self) -> None:
        """Allocates the memory on the current stream after `free`. Existing views become valid again."""
        if self._bytes.untyped_storage().size() != self._bytes.numel():
            self._resize(self._bytes.numel())

    def free(self) -> None:
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        self._bytes.untyped_storage().resize_(num_bytes)
        self._bytes.detach()  # a dispatch mode does not see `resize_`, so this op reports the new size


def aligned_num_bytes(specs: Sequence[Spec]) -> int:
    """Bytes of memory for flat tensors, each of which starts at a multiple of 512 bytes."""
    return sum(aligned_bytes(*spec) for spec in specs)


class UnitBuffer(FlatBuffer):
    """Flat buffer of parameters of one unit, of which this rank permanently holds one shard.

    `weights` (or `codes`) and `grads` are views of memory that contains their values only while they are used.
    """

    def __init__(
        self,
        layout: BufferLayout,
        grad_dtype: torch.dtype,
        context: ParallelContext,
        config: FSDPConfig,
        weights: tuple[UnitMemory, list[Tensor]] | None,
        grads: tuple[UnitMemory, Tensor],
        loads: list[float],
        region: SharedRegion | None,
    ) -> None:
        """`weights`: memory and flat tensors of weights or codes; None if all weights are always in memory. `loads`:
        see `BufferLayout.owner_ranges`. `region`: symmetric memory for the shards of weights; None if other ranks do
        not read them."""
        self.weight_memory = None if weights is None else weights[0]
        self.grad_memory = grads[0]
        self._flats, self._flat_grads = [] if weights is None else weights[1], grads[1]
        for flat in self._flats:
            flat.zero_()  # padding is updated, too, and must be finite
        super().__init__(layout, grad_dtype, context, sharded=True, loads=loads)
        (self.shard,) = self.owned
        """(start, end) of the elements whose weights and gradients this rank permanently holds."""
        self.replicas = _group_of_replicas(layout.key.grid, context)
        """Group of ranks that hold the same shard."""
        self.shards_state = config.outer_dp_sharding_strategy == "optim" and self.replicas is not None
        """Whether the replicas of a shard update different parts of it."""
        self.replica_sizes: Sizes = None
        """With `shards_state`, number of elements of the shard that each replica updates; None if they are equal."""
        if self.replicas is not None and self.shards_state:
            ranges = layout.divide_among_owners(self.shard, self.replicas.size, [0.0] * self.replicas.size)
            self.owned = (ranges[self.replicas.rank],)
            self.replica_sizes = none_if_equal([end - start for start, end in ranges])
        elif self.replicas is not None:
            self.counts = self.counts and self.replicas.rank == 0
        start, end = self.shard
        self.grad_shard = torch.zeros(end - start, dtype=grad_dtype, device=context.device)
        self.is_stored = False
        """Whether `grad_shard` contains gradients of this step, to which those of later microbatches are added."""
        self.weight_shards: tuple[Tensor, ...] = ()
        """This rank's shard of the flat tensors that store the weights; empty if all weights are always in memory."""
        self._region = region
        self.shared: tuple[SharedShards, ...] = ()
        """Shards of all ranks of these flat tensors; empty if this rank cannot read them."""
        self._parts: dict[Range, tuple[Tensor, ...]] = {}
        """Cached results of `storage_views` for all weights and for each parameter, because views cannot be created
        while the memory is not allocated."""
        self.is_whole = weights is None
        """Whether all weights stay in memory between uses, so that the optimizer writes to them directly."""
        self._gaps = [self.grads[a:b] for a, b in _gaps(layout)]

    def _sharding_group(self, context: ParallelContext) -> ProcessGroup:
        return sharding_group(self.key.grid, context)

    def _new_weights(self, device: torch.device) -> Tensor:
        return self._flats[0] if self._flats and not self.key.code_bits else super()._new_weights(device)

    def _new_codes(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(self._flats) if self._flats and self.key.code_bits else super()._new_codes(device)

    def _new_grads(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._flat_grads

    def tensors(self) -> Iterator[tuple[Literal["weights", "gradients"], Tensor]]:
        yield from super().tensors()
        yield from (("weights", shard) for shard in self.weight_shards)
        yield "gradients", self.grad_shard

    def adopt_parameters(
        self, parameters: dict[str, Parameter], queue: WeightGradQueue, interval: int, initial: InitialValues = None
    ) -> None:
        super().adopt_parameters(parameters, queue, interval, initial)
        if self.weight_memory is not None:
            self._store_shards(self.storage_views(*self.shard))
            ranges = [(0, self.layout.size), *((param.start, param.end) for param in self.layout.params)]
            self._parts = {each: super(UnitBuffer, self).storage_views(*each) for each in ranges}

    def _store_shards(self, parts: Sequence[Tensor]) -> None:
        """Copies this rank's part of each flat tensor to its permanent memory."""
        if self._region is None:
            self.weight_shards = tuple(part.clone() for part in parts)
            return
        by_rank = zip(*([size for size, _ in _stored_specs(self.layout, n)] for n in self._shard_sizes[0]), strict=True)
        self.shared = tuple(
            self._region.allocate(sizes, part.dtype) for sizes, part in zip(by_rank, parts, strict=True)
        )
        self.weight_shards = tuple(each.own.copy_(part) for each, part in zip(self.shared, parts, strict=True))

    def gather_shared(self) -> None:
        """Copies the shards of all ranks to the flat tensors that store the weights, which must be allocated."""
        for shared, flat in zip(self.shared, self.storage_views(0, self.layout.size), strict=True):
            shared.gather_into(flat)

    def owned_weights(self, start: int, end: int) -> Tensor:
        if self.is_whole or self.codes:
            return self.weights[start:end]
        return self.weight_shards[0][start - self.shard[0] : end - self.shard[0]]

    def storage_views(self, start: int, end: int) -> tuple[Tensor, ...]:
        return self._parts.get((start, end)) or super().storage_views(start, end)

    def owned_storage_views(self, start: int, end: int) -> tuple[Tensor, ...]:
        if not self.weight_shards:
            return self.storage_views(start, end)
        first, bits = self.shard[0], self.key.code_bits or (8,)
        pairs = zip(self.weight_shards, bits, strict=True)
        return tuple(shard[(start - first) * n // 8 : (end - first) * n // 8] for shard, n in pairs)

    @contextmanager
    def with_weights(self, weights: Tensor) -> Iterator[None]:
        """Context in which the parameters and `owned_weights` are views of `weights` instead of the unit's memory."""
        usual = self.weights, [each.parameter.data for each in self.main_grads]
        self._set_weights(weights)
        self.is_whole = True
        try:
            yield
        finally:
            self.weights, self.is_whole = usual[0], False
            for each, weight in zip(self.main_grads, usual[1], strict=True):
                each.parameter.data = weight

    def gather_owned_weights(self) -> None:
        if self.shards_state and self.replicas is not None:
            # collective over the outer dp_cp or edp group: the parts of one unit's shard
            start_all_gather_(self.weights[slice(*self.shard)], self.replicas, self.replica_sizes).wait()
        super().gather_owned_weights()

    def replica_update_sizes(self) -> list[Sizes]:
        """For each of `weight_shards`, sizes of the parts that the replicas of the shard update; None if they are
        equal."""
        return self._storage_sizes(self.replica_sizes)

    def owned_grads(self, start: int, end: int) -> Tensor:
        return self.grad_shard[start - self.shard[0] : end - self.shard[0]]

    def new_grad_bucket(self, index: int) -> GradBucket:
        bucket = super().new_grad_bucket(index)
        return UnitBucket(self, bucket)

    def begin_step(self, num_microbatches: int | None) -> None:
        super().begin_step(num_microbatches)
        self.is_stored = False

    def zero_missing_grads(self) -> None:
        """Zeroes the gradients that this microbatch has not computed, and the padding, which norms include."""
        for each in self.main_grads:
            each.zero_if_empty()
            each.filled = False
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def store_grads(self) -> None:
        """Adds the reduced gradients of a microbatch to the shard of this rank."""
        start, end = self.shard
        store(self.grads[start:end], self.grad_shard, self.is_stored)

    @property
    def sizes_of_shards(self) -> tuple[int, ...]:
        """Number of elements of the shards of all ranks."""
        return self._shard_sizes[0]


class UnitBucket(GradBucket):
    """Gradients of one `UnitBuffer`, which are reduced once per microbatch."""

    def __init__(self, buffer: UnitBuffer, bucket: GradBucket) -> None:
        super().__init__(bucket.grads, bucket.group, bucket.num_per_microbatch, ())
        self.buffer = buffer
        for each in buffer.main_grads:
            each.on_arrival = self.count_arrived

    @property
    def is_complete(self) -> bool:
        """Whether the last microbatch has added all of its gradients."""
        return self.num_arrived > 0 and self.num_arrived % self.num_per_microbatch == 0


class UnitReducer(GradReducer):
    """Reduces the gradients of a unit on a separate stream as soon as a microbatch has computed all of them.

    If shards have replicas, their gradients are summed over the replicas after the last microbatch.
    """

    def __init__(
        self, buckets: Sequence[GradBucket], config: DataParallelConfig, kernels: Kernels, peers: dict[Grid, PeerReduce]
    ) -> None:
        """`peers`: receive buffers of the grids whose gradients are reduced by copies."""
        super().__init__([bucket for bucket in buckets if not isinstance(bucket, UnitBucket)], config)
        self._peers = peers
        self._kernels = kernels
        self._rounds: dict[str, tuple[Round, ...]] = {}
        """Rounds of the reduction of each unit that is reduced by copies."""
        self._units: dict[str, list[UnitBucket]] = {}
        for bucket in buckets:
            if isinstance(bucket, UnitBucket):
                bucket.on_arrival = self._arrived
                self._units.setdefault(bucket.buffer.key.unit, []).append(bucket)
        self._arrivals = dict.fromkeys(self._units, 0)
        """Number of completed buckets of each unit, summed over the microbatches of the step."""
        self._streams = make_streams(buckets[0].grads.device, "reduce") if buckets else None
        self._is_finished = False
        """Whether the shards contain the gradients of the step."""

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return tuple(each.memory for each in self._peers.values())

    def begin_step(self, num_microbatches: int | None) -> None:
        super().begin_step(num_microbatches)
        self._arrivals = dict.fromkeys(self._units, 0)
        self._is_finished = False
        for buckets in self._units.values():
            for bucket in buckets:
                bucket.num_arrived = 0

    def mark_replayed(self) -> None:
        super().mark_replayed()
        self._is_finished = True
        for buckets in self._units.values():
            for bucket in buckets:
                # a graph's events cannot be waited for outside of it, and its end waits for them
                bucket.buffer.grad_memory.last_use = None

    def _arrived(self, bucket: GradBucket) -> None:
        assert isinstance(bucket, UnitBucket)
        if not bucket.is_complete:
            return
        unit = bucket.buffer.key.unit
        self._arrivals[unit] += 1
        if self._arrivals[unit] % sum(each.num_per_microbatch > 0 for each in self._units[unit]) == 0:
            self._reduce([each.buffer for each in self._units[unit]])

    def _reduce(self, buffers: Sequence[UnitBuffer]) -> None:
        """Starts the reduction of a unit's gradients and their addition to the shards."""
        assert self._streams is not None
        first = buffers[0]
        for buffer in buffers:
            buffer.zero_missing_grads()
        with self._streams.fork("reduce"):
            peers = self._peers.get(first.key.grid)
            if peers is None:
                self._reduce_by_collective(buffers)
            else:
                self._reduce_by_copies(buffers, peers)
            for buffer in buffers:
                buffer.is_stored = True
            first.grad_memory.last_use = self._streams.record()
        first.grad_memory.unit = ""

    def _reduce_by_collective(self, buffers: Sequence[UnitBuffer]) -> None:
        flats, group = [buffer.grads for buffer in buffers], buffers[0].group
        wide = self.config.ddp_reduce_scatter_with_fp32_accumulation and flats[0].element_size() < 4
        # collective over the inner dp_cp or edp group: the gradients of one unit
        for pending in start_reduce_scatters_(
            flats, group, [buffer.shard_sizes(0) for buffer in buffers], fp32_sums=wide
        ):
            pending.wait()
        for buffer in buffers:
            buffer.store_grads()

    def _reduce_by_copies(self, buffers: Sequence[UnitBuffer], peers: PeerReduce) -> None:
        unit, rank = buffers[0].key.unit, buffers[0].group.rank
        if unit not in self._rounds:
            flats = [buffer.grads for buffer in buffers]
            self._rounds[unit] = peers.plan_rounds(flats, [buffer.sizes_of_shards for buffer in buffers])
        for each in self._rounds[unit]:
            with peers.exchange_round(each):
                for flat, start, own, received_PN in each.received:
                    shard = buffers[flat].grad_shard[start : start + len(own)]
                    self._kernels.sum_contributions_(shard, own, received_PN, rank, accumulate=buffers[flat].is_stored)

    def complete_local_grads(self) -> None:
        super().complete_local_grads()
        for unit, buckets in self._units.items():
            missing = [bucket for bucket in buckets if bucket.num_per_microbatch and not bucket.is_complete]
            if all(bucket.num_arrived == 0 for bucket in buckets):
                continue  # `finish` zeroes the shards of a unit without gradients
            assert not missing, f"{unit}: a microbatch computed only some gradients, {missing[0].num_arrived} in a step"

    def finish(self) -> None:
        super().finish()
        if self._is_finished:
            return
        self._is_finished = True
        buffers = [bucket.buffer for buckets in self._units.values() for bucket in buckets]
        pending = []
        for buffer in buffers:
            if self._streams is not None:
                self._streams.wait(buffer.grad_memory.last_use)
            if not buffer.is_stored:
                buffer.grad_shard.zero_()
                buffer.is_stored = True
            if buffer.replicas is None:
                continue
            # collective over the outer dp_cp or edp group: sums the gradient shard of a unit over its replicas
            if buffer.shards_state:
                pending.append(start_reduce_scatter_(buffer.grad_shard, buffer.replicas, sizes=buffer.replica_sizes))
            else:
                pending.append(start_all_reduce_(buffer.grad_shard, buffer.replicas))
        for each in pending:
            each.wait()


class UnitSharding(Sharding):
    """Sharding of gradients (ZeRO-2) and weights (ZeRO-3) of units."""

    by_unit = True

    def __init__(self, config: FSDPConfig) -> None:
        self.config = config
        self._peers: dict[Grid, PeerReduce] = {}
        """Receive buffers of the grids whose gradients are reduced by copies."""

    def new_buffers(
        self, layout: ParamLayout, grad_dtype: torch.dtype, context: ParallelContext, *, sharded: bool
    ) -> Iterator[FlatBuffer]:
        assert sharded, "only a sharded optimizer updates shards"
        comm = grad_dtype if self.config.grad_comm is None else torch_dtype(self.config.grad_comm)
        units: dict[str, list[BufferLayout]] = {}
        for each in layout.buffers:
            units.setdefault(each.key.unit, []).append(each)
        shared = {unit: each for unit, each in units.items() if is_sharded(each[0].key.grid, context)}
        grads = _memories(shared, lambda each: [(each.size, comm)], context.device, share=True)
        self._peers = self._receive_buffers(layout, comm, context)
        weights: dict[str, UnitMemory] = {}
        if self.config.shards_weights:
            weights = _memories(shared, _stored_specs, context.device, share=self.config.fsdp_double_buffer)
        regions = self._regions(layout, context)
        views: dict[str, tuple[Iterator[Tensor], Iterator[Tensor]]] = {}
        loads: dict[BufferKey, list[float]] = {}
        """Update costs of the matrices of earlier units, per owning rank."""
        for each in layout.buffers:
            unit = each.key.unit
            if unit not in shared:
                yield FlatBuffer(each, grad_dtype, context, sharded=True)
                continue
            memory = weights.get(unit)
            if memory is not None:
                memory.allocate()
            if unit not in views:
                specs = [spec for member in units[unit] for spec in _stored_specs(member)]
                stored = [] if memory is None else memory.views(specs)
                sizes = [(member.size, comm) for member in units[unit]]
                views[unit] = iter(stored), iter(grads[unit].views(sizes))
            own = loads.setdefault(each.key.without_unit, [0.0] * sharding_group(each.key.grid, context).size)
            held = None if memory is None else (memory, [next(views[unit][0]) for _ in _stored_specs(each)])
            of_grads, region = (grads[unit], next(views[unit][1])), regions.get(each.key.grid)
            yield UnitBuffer(each, grad_dtype, context, self.config, held, of_grads, own, region)
            if memory is not None and not self.config.fsdp_double_buffer:
                memory.free()

    def new_reducer(self, buckets: Sequence[GradBucket], config: DataParallelConfig, kernels: Kernels) -> GradReducer:
        return UnitReducer(buckets, config, kernels, self._peers)

    def _regions(self, layout: ParamLayout, context: ParallelContext) -> dict[Grid, SharedRegion]:
        """Symmetric memory for the shards of weights, for each grid whose ranks can access each other's memory."""
        if not (self.config.shards_weights and self.config.gathers_from_peers):
            return {}
        num_bytes: dict[Grid, list[int]] = {}
        for each, sizes in _sizes_of_shards(layout, context):
            of_ranks = num_bytes.setdefault(each.key.grid, [0] * len(sizes))
            for rank, size in enumerate(sizes):
                of_ranks[rank] += aligned_num_bytes(_stored_specs(each, size))
        return {
            grid: SharedRegion(max(of_ranks), sharding_group(grid, context), context)
            for grid, of_ranks in num_bytes.items()
        }

    def _receive_buffers(
        self, layout: ParamLayout, dtype: torch.dtype, context: ParallelContext
    ) -> dict[Grid, PeerReduce]:
        """Receive buffers for the gradients of each grid, if the ranks of a shard can write to each other's memory."""
        if not self.config.reduces_through_peers:
            return {}
        units: dict[Grid, dict[str, list[list[int]]]] = {}
        for each, sizes in _sizes_of_shards(layout, context):
            units.setdefault(each.key.grid, {}).setdefault(each.key.unit, []).append(sizes)
        found: dict[Grid, PeerReduce] = {}
        for grid, of_units in units.items():
            group = sharding_group(grid, context)
            slot_bytes = receive_slot_bytes(list(of_units.values()), dtype, MOST_RECEIVE_BYTES)
            found[grid] = PeerReduce(slot_bytes, group, context)
        return found


def _sizes_of_shards(layout: ParamLayout, context: ParallelContext) -> Iterator[tuple[BufferLayout, list[int]]]:
    """Yields each buffer whose shards belong to ranks that can access each other's memory, with the number of elements
    of each rank's shard."""
    loads: dict[BufferKey, list[float]] = {}
    for each in layout.buffers:
        group = sharding_group(each.key.grid, context)
        if can_share(group, context):
            own = loads.setdefault(each.key.without_unit, [0.0] * group.size)
            yield each, [end - start for ((start, end),) in each.owner_ranges(group.size, own)]


def nccl_fallback_notes(config: FSDPConfig, context: ParallelContext) -> Iterator[str]:
    """Yields a log line for each kind of parameters whose shards cannot be gathered and reduced by copies, although the
    configuration allows it."""
    what = ["gathered"] * (config.shards_weights and config.gathers_from_peers)
    what += ["reduced"] * config.reduces_through_peers
    names: dict[Grid, str] = {"attention": "dense parameters", "expert": "experts"}
    for grid, name in names.items():
        reason = sharing_problem(sharding_group(grid, context), context)
        if what and reason:
            yield f"--use-megatron-fsdp: shards of {name} are {' and '.join(what)} by NCCL, because {reason}"


def is_sharded(grid: Grid, context: ParallelContext) -> bool:
    """Whether the weights of a grid have data-parallel replicas, so that they are sharded or their gradients are
    reduced."""
    return context.group(replica_group_name(grid)).size > 1


def sharding_group(grid: Grid, context: ParallelContext) -> ProcessGroup:
    """Process group over which the weights of a grid are sharded."""
    name = replica_group_name(grid)
    return context.group(name if context.config.num_distributed_optimizer_instances == 1 else f"{name}_inner")


def _group_of_replicas(grid: Grid, context: ParallelContext) -> ProcessGroup | None:
    if context.config.num_distributed_optimizer_instances == 1:
        return None
    return context.group(f"{replica_group_name(grid)}_outer")


def is_single_use_layer(unit: str, layouts: Sequence[BufferLayout]) -> bool:
    """Whether a unit belongs to a layer that runs once per microbatch, so that layers can share memory."""
    uses = {param.parameter.uses for layout in layouts for param in layout.params}
    return "." in unit and uses <= {0, 1}


def _stored_specs(layout: BufferLayout, size: int | None = None) -> list[Spec]:
    """Sizes and dtypes of the flat tensors that store the weights of a buffer, or `size` elements of it."""
    size = layout.size if size is None else size
    if layout.key.code_bits:
        return [(size * bits // 8, torch.uint8) for bits in layout.key.code_bits]
    return [(size, torch_dtype(layout.key.storage))]


def _memories(
    units: dict[str, list[BufferLayout]],
    specs: Callable[[BufferLayout], list[Spec]],
    device: torch.device,
    *,
    share: bool,
) -> dict[str, UnitMemory]:
    """Creates the memory of every unit. If `share`, layers share `NUM_BUFFERS` memories for dense parameters and as
    many for experts."""
    groups: dict[object, list[str]] = {}
    number = {"attention": 0, "expert": 0}
    for unit, layouts in units.items():
        grid = layouts[0].key.grid
        if share and is_single_use_layer(unit, layouts):
            groups.setdefault((grid, number[grid] % NUM_BUFFERS), []).append(unit)
            number[grid] += 1
        else:
            groups[unit] = [unit]
    found: dict[str, UnitMemory] = {}
    for members in groups.values():
        size = max(aligned_num_bytes([spec for each in units[unit] for spec in specs(each)]) for unit in members)
        memory = UnitMemory(size, device)
        if not share:
            memory.free()
        found |= dict.fromkeys(members, memory)
    return found


def _gaps(layout: BufferLayout) -> list[Range]:
    """Ranges of a buffer that are padding."""
    ends = [0, *(param.end for param in layout.params)]
    starts = [*(param.start for param in layout.params), layout.size]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
