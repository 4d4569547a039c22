"""Gathers the sharded weights of a unit before its use, and those of the next units during it (ZeRO-3).

The gathers run on a separate stream, in the order of use. Weights stay in memory until another layer needs the memory,
so that the last layers of a forward pass need no gather in backward. Weights of embedding, head and layers that run
several times are gathered once per step.

The first gather of a unit after its update is a collective, which waits for the updates of the other ranks. Within a
host, later gathers of the step may copy the shards from the memory of the other ranks (`SharedShards`). No rank changes
a shard while another one copies it: its next update follows the reduction of the unit's gradients, to which every rank
contributes after its last use of the unit in a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from megatron_moe.config.fsdp import NUM_BUFFERS, FSDPConfig
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.param_layout import Direction, forward_order
from megatron_moe.optim.param_store import ParamStore
from megatron_moe.optim.unit_shards import UnitBuffer, is_single_use_layer
from megatron_moe.parallel.collectives import start_all_gather_, start_all_gathers_
from megatron_moe.parallel.streams import Event, Streams, make_streams


class _Unit:
    """Buffers of one unit. Its gradients are sharded; its weights are sharded unless `memory` is None."""

    def __init__(self, name: str, buffers: Sequence[UnitBuffer]) -> None:
        self.name = name
        self.buffers = tuple(buffers)
        self.memory = buffers[0].weight_memory
        self.grad_memory = buffers[0].grad_memory
        self.grid = buffers[0].key.grid
        self.is_layer = is_single_use_layer(name, [buffer.layout for buffer in buffers])
        self.chunk = 0
        """Model chunk of the rank that contains the unit."""
        self.uses = 0
        """Number of acquired and not yet released uses."""
        self.gathered: Event = None
        """Event that completes with the last gather of the weights, or of this rank's shard of them after an update."""
        self.is_published = False
        """Whether all ranks have gathered the unit since its last update, so that their shards are current."""

    @property
    def is_present(self) -> bool:
        return self.memory is None or self.memory.unit == self.name


class GatheringStore(ParamStore):
    """Store of units whose gradients, and with ZeRO-3 weights, are sharded. Other units are always in memory."""

    frees_units = True

    def __init__(self, buffers: GradBuffers) -> None:
        super().__init__(buffers)
        config = buffers.data_parallel.fsdp
        assert config is not None, "the run shards no weights or gradients"
        self._config: FSDPConfig = config
        self._streams = make_streams(buffers.device, "gather")
        self._weight_grads = buffers.queue
        found: dict[str, list[UnitBuffer]] = {}
        self._buffer_of: dict[int, UnitBuffer] = {}
        """Buffer of each bucket with sharded gradients."""
        for bucket, (number, _) in enumerate(forward_order(buffers.layout)):
            buffer = buffers.buffers[number]
            if isinstance(buffer, UnitBuffer):
                found.setdefault(buffer.key.unit, []).append(buffer)
                self._buffer_of[bucket] = buffer
        self._sharded_units = {name: _Unit(name, members) for name, members in found.items()}
        order = [name for name in self._units if name in self._sharded_units]
        order.sort(key=lambda name: min(self._units[name]))
        self._order = [self._sharded_units[name] for name in order]
        self._index = {unit.name: index for index, unit in enumerate(self._order)}
        chunk, last = 0, 0
        for index, unit in enumerate(self._order):
            kind, _, rest = unit.name.partition(".")
            if kind == "layers":
                layer = int(rest.partition(".")[0])
                chunk, last = chunk + (layer > last + 1 and index > 0), layer
            unit.chunk = chunk
        self._recent: list[_Unit] = []
        """Layers with gathered weights, the least recently used first."""
        self.trace: list[tuple[str, str]] | None = None
        """(event, unit) of all gathers and uses; None if they are not recorded."""

    @property
    def gathers(self) -> bool:
        return True

    def begin_step(self) -> None:
        super().begin_step()
        self._forget_gathers()

    def _whole_buckets(self) -> Iterable[int]:
        return [bucket for bucket in super()._whole_buckets() if not self._is_sharded(bucket)]

    def _is_sharded(self, bucket: int) -> bool:
        buffer = self._buffer_of.get(bucket)
        return buffer is not None and buffer.weight_memory is not None

    def mark_replayed(self) -> None:
        super().mark_replayed()
        self._forget_gathers()

    def _forget_gathers(self) -> None:
        """Discards all gathered weights at the border of a graph, which contains the gathers of all weights that it
        uses. Events on the two sides of a border cannot be waited for on the other side, so the gathers of one side
        follow all work of the current stream before it."""
        here = self._streams.record()
        self._recent = []
        for unit in self._order:
            assert not unit.uses, f"{unit.name} is in use between two steps"
            if unit.memory is not None:
                unit.memory.unit, unit.memory.last_use = "", here
                unit.gathered, unit.is_published = None, False

    def acquire(self, unit: str, direction: Direction = "forward") -> None:
        found = self._sharded_units.get(unit)
        if found is None or found.memory is None:
            super().acquire(unit)
        if found is None:
            return
        found.uses += 1
        if found.memory is not None:
            self._provide(found)
            self._streams.wait(found.gathered)
        if direction == "backward":
            self._begin_grads(found)
        self._record("use", found)
        if found.memory is not None:
            # The forward of a layer that is recomputed in backward precedes its own backward: a prefetch of another
            # layer would discard the layer's experts, which are used next.
            if direction == "backward" or torch._C._current_graph_task_id() < 0:
                self._prefetch(found, 1 if direction == "forward" else -1)

    def release(self, unit: str, direction: Direction = "forward") -> None:
        found = self._sharded_units.get(unit)
        if found is None or found.memory is None:
            super().release(unit)
        if found is None:
            return
        found.uses -= 1
        assert found.uses >= 0, f"{unit} was released more often than acquired"
        if found.memory is not None and found.uses == 0:
            found.memory.last_use = self._streams.record()

    def wait_for_pending(self) -> None:
        """Makes the current stream wait for all updates and gathers, so that shards may be written."""
        super().wait_for_pending()
        for unit in self._order:
            if unit.memory is not None:
                self._streams.wait(unit.gathered)

    def publish(self, bucket: int, streams: Streams | None = None) -> None:
        """Discards the gathered weights of the bucket's unit after an update of its shards."""
        if not self._is_sharded(bucket):
            super().publish(bucket, streams)
            return
        buffer = self._buffer_of[bucket]
        unit = self._sharded_units[buffer.key.unit]
        assert unit.uses == 0, f"{unit.name} is in use during an update"
        self._replace_shard(unit, buffer)

    def _replace_shard(self, unit: _Unit, buffer: UnitBuffer) -> None:
        """Discards the gathered weights of a unit after a change of this rank's part of a shard. Later gathers wait for
        the change, and for the parts of other ranks."""
        unit.is_published = False
        if unit.is_present:
            self._discard(unit)
        with self._streams.fork("gather"):
            _gather_shard(buffer)
            unit.gathered = self._streams.record()
        if self._defers_gathers:  # the graph of the next step cannot wait for it
            self._streams.wait(unit.gathered)

    @contextmanager
    def all_weights(self) -> Iterator[None]:
        self.wait_for_pending()
        with ExitStack() as stack:
            for unit in self._order:
                for buffer in unit.buffers if unit.memory is not None else ():
                    if not buffer.codes and not buffer.is_whole:  # already allocated by an outer context
                        stack.enter_context(self._whole(buffer))
            yield

    @contextmanager
    def _whole(self, buffer: UnitBuffer) -> Iterator[None]:
        """Context in which all weights of a buffer are present. Changes take effect at the end."""
        flat = torch.empty_like(buffer.weights)
        self._gather_into([buffer], [(flat,)])
        with buffer.with_weights(flat):
            yield
            (start, end), first = buffer.owned[0], buffer.shard[0]
            buffer.weight_shards[0][start - first : end - first] = buffer.weights[start:end]
        self._replace_shard(self._sharded_units[buffer.key.unit], buffer)

    def _provide(self, unit: _Unit) -> None:
        """Starts the gather of a unit unless its weights are in memory."""
        if unit.is_layer:
            self._recent = [*(each for each in self._recent if each is not unit), unit]
        if unit.is_present:
            return
        memory = unit.memory
        assert memory is not None
        if memory.unit:
            self._discard(self._sharded_units[memory.unit])
        while unit.is_layer and not self._config.fsdp_double_buffer and len(self._rivals(unit)) >= self._most:
            unused = next((each for each in self._rivals(unit) if not each.uses), None)
            if unused is None:
                break
            self._discard(unused)
        copies = unit.is_published and all(buffer.shared for buffer in unit.buffers)
        self._record("copy" if copies else "gather", unit)
        with self._streams.on("gather"):
            self._streams.wait(memory.last_use)
            memory.allocate()
            if copies:
                for buffer in unit.buffers:
                    buffer.gather_shared()
            else:
                whole = [buffer.storage_views(0, buffer.layout.size) for buffer in unit.buffers]
                self._gather_into(unit.buffers, whole)
            unit.gathered = self._streams.record()
        unit.is_published = True
        memory.unit = unit.name

    @property
    def _most(self) -> int:
        return NUM_BUFFERS * self._config.num_passes

    def _rivals(self, unit: _Unit) -> list[_Unit]:
        """Other layers of the same grid with gathered weights, whose memory `unit` may use; the least recently used
        first."""
        return [each for each in self._recent if each is not unit and each.grid == unit.grid]

    def _gather_into(self, buffers: Sequence[UnitBuffer], flats: Sequence[Sequence[Tensor]]) -> None:
        shards = [shard for buffer in buffers for shard in buffer.weight_shards]
        sizes = [each for buffer in buffers for each in buffer.storage_shard_sizes(0)]
        # collective over the inner dp_cp or edp group: the weights of one unit
        for pending in start_all_gathers_([flat for each in flats for flat in each], shards, buffers[0].group, sizes):
            pending.wait()

    def _discard(self, unit: _Unit) -> None:
        """Makes the memory of a unit's weights available to later gathers."""
        assert not unit.uses, f"{unit.name} is in use, but its memory is needed"
        memory = unit.memory
        assert memory is not None
        self._recent = [each for each in self._recent if each is not unit]
        memory.unit = ""
        if not self._config.fsdp_double_buffer:
            with self._streams.on("gather"):
                self._streams.wait(memory.last_use)
            memory.free()

    def _prefetch(self, unit: _Unit, step: int) -> None:
        """Starts the gathers of the next layers of the same model chunk in both grids, if there is memory that is not
        in use, and of embedding and head on the way. The schedule may run another microbatch next instead of the next
        chunk, and MTP layers use the embedding in the middle of a pass."""
        missing = {"attention", "expert"} if unit.is_layer else set[str]()
        index = self._index[unit.name] + step
        while 0 <= index < len(self._order) and missing:
            following = self._order[index]
            index += step
            if following.memory is None:
                continue
            if following.is_layer:
                if following.grid not in missing or following.chunk != unit.chunk:
                    continue
                missing.discard(following.grid)
            if not following.is_present and self._may_gather(following):
                self._provide(following)

    def _may_gather(self, unit: _Unit) -> bool:
        assert unit.memory is not None
        if not unit.is_layer:
            return True
        if self._config.fsdp_double_buffer:
            holder = self._sharded_units.get(unit.memory.unit)
            return holder is None or not holder.uses
        rivals = self._rivals(unit)
        return len(rivals) < self._most or any(not each.uses for each in rivals)

    def _begin_grads(self, unit: _Unit) -> None:
        """Makes the current stream wait until the gradients that last used the unit's memory have been reduced."""
        memory = unit.grad_memory
        if memory.unit == unit.name:
            return
        if memory.unit:
            # The unit in this memory has deferred weight gradients. Exchanges of experts run the queue in backward, but
            # none follows the layers before the first MoE layer or lies between two consecutive MoE layers.
            self._weight_grads.run()
        assert not memory.unit, f"gradients of {memory.unit} are not complete, but {unit.name} needs their memory"
        self._streams.wait(memory.last_use)
        memory.last_use = None
        memory.unit = unit.name

    def _record(self, event: str, unit: _Unit) -> None:
        if self.trace is not None:
            self.trace.append((event, unit.name))


def _gather_shard(buffer: UnitBuffer) -> None:
    """Gathers the parts of this rank's shard that the replicas of the shard have updated."""
    if buffer.shards_state and buffer.replicas is not None:
        for shard, sizes in zip(buffer.weight_shards, buffer.replica_update_sizes(), strict=True):
            # collective over the outer dp_cp or edp group: gathers the parts of one unit's shard
            start_all_gather_(shard, buffer.replicas, sizes).wait()
