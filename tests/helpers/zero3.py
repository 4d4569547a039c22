"""ZeRO-3 on the interfaces of the product: weights and gradients are sharded, and one unit is gathered beside another.

Weights leave memory when a third unit is gathered, gradients after every microbatch. Collectives are not overlapped.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_moe.optim.grad_buffers import FlatBuffer, GradBuffers, Sharding
from megatron_moe.optim.grad_reduce import GradBucket, GradReducer
from megatron_moe.optim.param_layout import Direction
from megatron_moe.optim.param_store import ParamStore
from megatron_moe.parallel.collectives import start_all_gather_

MOST_ALIVE = 2


class ShardedBuffer(FlatBuffer):
    """Flat buffer of one unit, of which only the shards of this rank are always present."""

    def adopt(self, *args) -> None:
        super().adopt(*args)
        ((self.first, end),) = self.owned
        self.shards = self.weights[self.first : end].clone(), self.grads[self.first : end].clone()

    def owned_weights(self, start: int, end: int) -> Tensor:
        return self.shards[0][start - self.first : end - self.first]

    def owned_grads(self, start: int, end: int) -> Tensor:
        return self.shards[1][start - self.first : end - self.first]

    def gather(self) -> None:
        resize(self.weights, present=True)
        (owned,) = self.owned
        self.weights[slice(*owned)] = self.shards[0]
        start_all_gather_(self.weights, self.group, self.shard_sizes(0)).wait()

    def begin_step(self, num_microbatches: int | None) -> None:
        super().begin_step(num_microbatches)
        self.shards[1].zero_()

    def reduced(self) -> None:
        (owned,) = self.owned
        self.shards[1].add_(self.grads[slice(*owned)])
        resize(self.grads, present=False)
        for slot in self.slots:
            slot.filled = False


class EveryMicrobatch(GradReducer):
    """Reduces a unit's gradients as soon as a microbatch has added all of them."""

    def arrived(self, bucket: GradBucket) -> None:
        if bucket.num_arrived % bucket.num_per_microbatch == 0:
            bucket.start(self.config)
            bucket.finish()
            bucket.pending = None

    def complete(self) -> None:
        assert all(bucket.num_arrived % bucket.num_per_microbatch == 0 for bucket in self.buckets)

    def finish(self) -> None:
        """All gradients have left with their microbatches."""


class Zero3Store(ParamStore):
    """Gathers the weights of a unit when it is acquired. `most_bytes`: largest size of gathered weights so far."""

    frees_units = True

    def __init__(self, buffers: GradBuffers) -> None:
        super().__init__(buffers)
        self._buffers = {unit: [b for b in buffers.buffers if b.key.unit == unit] for unit in self._units}
        self._uses: Counter[str] = Counter()
        self._alive: list[str] = []
        self.unit_bytes = {unit: sum(size_of(b.weights) for b in found) for unit, found in self._buffers.items()}
        self.most_bytes = 0
        for buffer in self._all():
            for flat in (buffer.weights, buffer.grads):
                resize(flat, present=False)

    def acquire(self, unit: str, direction: Direction = "forward") -> None:
        self._uses[unit] += 1
        if unit not in self._alive:
            while len(self._alive) >= MOST_ALIVE:
                self._drop(next(each for each in self._alive if not self._uses[each]))
            self._gather(unit)
        for buffer in self._buffers[unit]:
            if direction == "backward" and not size_of(buffer.grads):
                resize(buffer.grads, present=True)
                buffer.grads.zero_()  # padding counts in norms
        self.most_bytes = max(self.most_bytes, sum(size_of(buffer.weights) for buffer in self._all()))

    def release(self, unit: str, direction: Direction = "forward") -> None:
        self._uses[unit] -= 1
        assert self._uses[unit] >= 0, f"{unit} was released more often than acquired"

    def acquire_all(self) -> None:
        """No weights are ever pending."""

    def write_back(self, bucket: int, streams=None) -> None:
        assert not +self._uses, f"units {+self._uses} are in use during an update"
        for unit in tuple(self._alive):
            self._drop(unit)

    @contextmanager
    def all_weights(self) -> Iterator[None]:
        for unit in self._units:
            self._gather(unit)
        yield
        for buffer in self._all():
            ((start, end),) = buffer.owned
            buffer.shards[0].copy_(buffer.weights[start:end])
        for unit in self._units:
            self._drop(unit)

    def _gather(self, unit: str) -> None:
        for buffer in self._buffers[unit]:
            buffer.gather()
        self._alive.append(unit)

    def _drop(self, unit: str) -> None:
        self._alive = [each for each in self._alive if each != unit]
        for buffer in self._buffers[unit]:
            resize(buffer.weights.fill_(torch.nan), present=False)

    def _all(self) -> list[FlatBuffer]:
        return [buffer for buffers in self._buffers.values() for buffer in buffers]


ZERO_3 = {"sharding": Sharding(by_unit=True, buffer=ShardedBuffer, reducer=EveryMicrobatch), "store": Zero3Store}
"""Arguments of `build_trainer`."""


def size_of(flat: Tensor) -> int:
    return flat.untyped_storage().size()


def resize(flat: Tensor, *, present: bool) -> None:
    """Frees or allocates the memory of a flat tensor; its views stay valid."""
    wanted = flat.numel() * flat.element_size() if present else 0
    if size_of(flat) != wanted:
        flat.untyped_storage().resize_(wanted)
