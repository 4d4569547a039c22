"""Parameters of one rank, divided into units (e.g. a layer without its experts) that are acquired before use.

The optimizer publishes new weights bucket by bucket (`publish`). A bucket is then pending. When model code acquires
a unit, the current stream waits for the updates and all-gathers of the unit's pending buckets. Under ZeRO-0 and ZeRO-1
weights and gradients of all units are resident, so `release` frees nothing and backward acquires nothing.
If a CUDA graph runs whole steps, it contains the all-gathers (`defer_gathers_to_step_start`), because a graph cannot
wait for work that was launched outside it.

A subclass may free units between their uses (`frees_units`). It must keep the storage objects of weights and gradients,
of which parameters and tensors saved by autograd are views, and change only their size; and, for units in CUDA graphs,
provide them at the same addresses every time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.param_layout import Direction, forward_order
from megatron_moe.parallel.collectives import PendingCollective, start_all_gather_
from megatron_moe.parallel.streams import Event, Streams


class AcquiringModel(Protocol):
    """Model whose computation steps (`Node`) acquire their parameters before they run."""

    def acquire_from(self, store: "ParamStore") -> None:
        """Sets the store from which all nodes acquire the units of their parameters before they run."""


class _PendingBucket(NamedTuple):
    """Bucket whose new weights have been published but not yet acquired by a unit with parameters in the bucket."""

    streams: Streams | None
    """`Streams` whose optimizer stream ran the update; None if the update ran on the stream that reads the weights."""
    stepped: Event
    """Event that was recorded on the optimizer stream after the update."""
    gathers: tuple[PendingCollective, ...]


class ParamStore:
    """Weights and gradients of one rank by unit (`ParamShape.unit`). Buckets are numbered in `forward_order`."""

    frees_units = False
    """See `UnitStore.frees_units`."""

    def __init__(self, buffers: GradBuffers) -> None:
        buckets = [(buffers.buffers[number], index) for number, index in forward_order(buffers.layout)]
        self._buckets = [(buffer.storage_views(*buffer.layout.buckets[i]), buffer.group) for buffer, i in buckets]
        self._sizes = [buffer.storage_shard_sizes(i) for buffer, i in buckets]
        """Number of elements or bytes of each rank's shard of the flat tensors of each bucket."""
        self._sharded = buffers.data_parallel.use_distributed_optimizer
        self._units = buffers.layout.buckets_of_units()
        self._unit_of: dict[int, str] = {}
        for buffer in buffers.buffers:
            for param, each in zip(buffer.layout.params, buffer.main_grads, strict=True):
                self._unit_of[id(each.parameter)] = param.parameter.unit
        self._pending: dict[int, _PendingBucket] = {}
        self._defers_gathers = False
        self._stale: set[int] = set()
        """Buckets with published new weights that the next step will gather."""

    def defer_gathers_to_step_start(self) -> None:
        """Postpones the all-gathers of published weights to `begin_step`, or to the first use if that is earlier."""
        self._defers_gathers = True

    def begin_step(self) -> None:
        """If `defer_gathers_to_step_start` was called, starts the all-gathers of all buckets in forward order, even of
        buckets without new weights."""
        if self._defers_gathers:
            for bucket in self._whole_buckets():
                self._start_gather(bucket)

    def _whole_buckets(self) -> Iterable[int]:
        """Buckets whose weights stay in memory."""
        return range(len(self._buckets))

    def mark_replayed(self) -> None:
        """Called when a CUDA graph has replayed a step, and with it the all-gathers that `begin_step` starts."""
        self._stale.clear()

    @property
    def gathers(self) -> bool:
        """True if weights must be gathered from other ranks after a step."""
        return self._sharded and any(group.size > 1 for _, group in self._buckets)

    def is_quantized(self, bucket: int) -> bool:
        """True if the weights of the bucket are stored as FP8 or FP4 bytes."""
        return self._buckets[bucket][0][0].dtype is torch.uint8

    def units_of(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Units that contain the parameters, without duplicates. Frozen parameters have no unit."""
        found = (self._unit_of.get(id(parameter)) for parameter in parameters)
        return tuple(dict.fromkeys(unit for unit in found if unit is not None))

    def acquire(self, unit: str, direction: Direction = "forward") -> None:
        """Makes the current stream wait for the new weights of the unit's pending buckets."""
        if self._pending or self._stale:
            self._wait(self._units[unit])

    def wait_for_pending(self) -> None:
        """Makes the current stream wait for the new weights of all pending buckets."""
        self._wait(range(len(self._buckets)))

    @contextmanager
    def all_weights(self) -> Iterator[None]:
        """Context in which the weights of all units are present. Changes of the weights are kept. Collective."""
        self.wait_for_pending()
        yield

    def release(self, unit: str, direction: Direction = "forward") -> None:
        """Marks the end of a use of the unit's weights; frees nothing. The unit must have been acquired."""
        if self._pending or self._stale:
            missing = [index for index in self._units[unit] if index in self._pending or index in self._stale]
            assert not missing, f"{unit} was read while its buckets {missing} were pending"

    def publish(self, bucket: int, streams: Streams | None = None) -> None:
        """Publishes the new weights of a bucket after this rank's update of the ranges that it owns.

        Starts the all-gather of the bucket if the optimizer is sharded. `streams`: `Streams` whose optimizer stream ran
        the update; None if the update ran on the stream that reads the weights.
        """
        if self._defers_gathers:
            assert streams is None, "a graph of whole steps with --overlap-optimizer-step"
            self._stale.add(bucket)
        else:
            self._start_gather(bucket, streams)

    def _start_gather(self, bucket: int, streams: Streams | None = None) -> None:
        assert bucket not in self._pending, f"new weights of bucket {bucket} were not acquired before the next update"
        self._stale.discard(bucket)
        stored, group = self._buckets[bucket]
        # collective over dp_cp or edp: one bucket of weights, by default 40 million elements, or of their FP8 or FP4
        # bytes
        pairs = zip(stored, self._sizes[bucket], strict=True) if self._sharded else ()
        gathers = tuple(start_all_gather_(flat, group, sizes) for flat, sizes in pairs)
        if streams is not None or gathers:
            self._pending[bucket] = _PendingBucket(streams, streams.record() if streams else None, gathers)

    def publish_all(self) -> None:
        """Publishes all buckets in forward order."""
        for bucket in range(len(self._buckets)):
            self.publish(bucket)

    def _wait(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            if index in self._stale:
                self._start_gather(index)
            pending = self._pending.pop(index, None)
            if pending is None:
                continue
            if pending.streams is not None:
                pending.streams.wait(pending.stepped)
            for gather in pending.gathers:
                gather.wait()
