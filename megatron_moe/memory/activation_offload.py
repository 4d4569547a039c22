"""Tensors that chosen modules save for the backward wait in host memory.

What one run of a module saves is a group. When the module has run, its group sets out for the host, behind the modules
that follow. In the backward a group comes back while the module that ran after it is differentiated. The last group of
every module stays where the backward follows its forward at once: there is nothing to hide its way behind. How many
groups a chunk of the model has is learnt from its first forward, of which all are sent.

Memory is what is moved: one storage once, whoever saves it and however it is viewed. Parameters stay.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_moe.config.memory import ActivationOffloadConfig
from megatron_moe.memory.output_discard import PackedTensor, storage_of
from megatron_moe.parallel.streams import Event, HostCopies

At = tuple[int, int]
"""(microbatch, chunk)."""


class BufferPool:
    """Host buffers of offloaded tensors; a buffer is reused once the copy that reads it has finished."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Event]]] = defaultdict(list)
        self.num_buffers = 0
        """Host buffers allocated so far."""
        self.bytes_to_host = 0
        self.bytes_to_device = 0

    def offload(self, flat: Tensor) -> tuple[Tensor, Event]:
        """Starts a copy to the host: (buffer, event at its end). The caller may free `flat` at once."""
        free = self._free[flat.numel(), flat.dtype]
        buffer, read = free.pop() if free else (self._allocate(flat), None)
        self.bytes_to_host += flat.nbytes
        return buffer, self.copies.to_host(buffer, flat, read, free_source=True)

    def reload(self, buffer: Tensor, written: Event, device: torch.device) -> tuple[Tensor, Event]:
        """Starts a copy back: (tensor on the device, event at its end)."""
        self.bytes_to_device += buffer.nbytes
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=device)
        # work queued before this point may still use the memory that was just allocated
        allocated = self.copies.record()
        return flat, self.copies.to_device(flat, buffer, allocated, written, free_into=True)

    def give_back(self, buffer: Tensor, read: Event) -> None:
        """The buffer may be overwritten after `read`."""
        self._free[buffer.numel(), buffer.dtype].append((buffer, read))

    def _allocate(self, flat: Tensor) -> Tensor:
        self.num_buffers += 1
        return self.copies.host_buffer(flat.numel(), flat.dtype, exact=False)


class OffloadedTensor:
    """One storage of one group, on the device, on the host, or both. It lives as long as somebody has saved it."""

    def __init__(self, tensor: Tensor, pool: BufferPool) -> None:
        number = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._flat: Tensor | None = tensor.detach().as_strided((number,), (1,), 0)
        self._device = tensor.device
        self._pool = pool
        self._buffer: Tensor | None = None
        self._copied: Event = None
        self.nbytes = self._flat.nbytes

    def send(self) -> Event:
        """Starts the copy to the host and drops the device memory."""
        assert self._flat is not None, "sent twice"
        self._buffer, self._copied = self._pool.offload(self._flat)
        self._flat = None
        return self._copied

    def fetch(self) -> None:
        """Starts the copy to the device, unless it is there or already under way."""
        if self._flat is None:
            assert self._buffer is not None, "neither here nor on the host"
            self._flat, self._copied = self._pool.reload(self._buffer, self._copied, self._device)

    def here(self) -> Tensor:
        """All elements, flat, for the computation."""
        self.fetch()
        assert self._flat is not None
        if self._buffer is not None:
            self._pool.copies.wait(self._copied)
        return self._flat

    def __del__(self) -> None:
        if self._buffer is not None:
            self._pool.give_back(self._buffer, self._copied)


@dataclass(eq=False)
class OffloadGroup:
    """What one run of a module saved."""

    module: str
    flight: "InFlightOffloads"
    number: int
    """In the flight."""
    moved: list[ReferenceType[OffloadedTensor]] = field(default_factory=list)
    sent: bool = False
    nbytes: int = 0

    def fetch(self) -> None:
        for reference in self.moved:
            moved = reference()
            if moved is not None:
                moved.fetch()


@dataclass(eq=False)
class InFlightOffloads:
    """One microbatch between its forward and its backward in one chunk."""

    at: At
    groups: list[OffloadGroup] = field(default_factory=list)
    known: dict[tuple[int, torch.dtype], tuple[StorageWeakRef, ReferenceType[OffloadedTensor]]] = field(
        default_factory=dict
    )
    """By storage; the weak reference keeps its place from being taken by another one."""
    send: frozenset[int] | None = None
    """Numbers of the groups to send; None: all."""

    def fetch_before(self, number: int) -> bool:
        """Starts the way back of the last group before `number` that was sent; False: there is none."""
        for group in reversed(self.groups[:number]):
            if group.sent:
                group.fetch()
                return True
        return False


@dataclass(frozen=True)
class _Ticket:
    """Instead of a saved tensor."""

    offload: "ActivationOffload"
    group: OffloadGroup
    moved: OffloadedTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self) -> Tensor:
        self.offload.needed(self.group)
        return self.moved.here().as_strided(self.shape, self.stride, self.offset)


class ActivationOffload:
    """Which groups wait on the host, and when they come back. One object per rank."""

    def __init__(self, config: ActivationOffloadConfig, copies: HostCopies, *, stay_bytes: int = 0) -> None:
        """`stay_bytes`: of the last groups of every microbatch and chunk at least so many bytes stay."""
        self.config = config
        self.pool = BufferPool(copies)
        self._stay_bytes = stay_bytes
        self._flights: dict[At, InFlightOffloads] = {}
        self._current = InFlightOffloads((0, 0))
        self._learnt: dict[int, tuple[tuple[str, int], ...]] = {}
        """By chunk: module and bytes of every group."""
        self._after: Mapping[At, At] = {}
        self._at_once: frozenset[At] = frozenset()
        self._leaving: dict[str, deque[Event]] = {}

    def begin_pass(self, computations: Sequence[tuple[str, At]]) -> None:
        """What the rank is going to compute, in order: ("forward" or "backward", at)."""
        backwards = [at for kind, at in computations if kind == "backward"]
        self._after = dict(zip(backwards, backwards[1:], strict=False))
        following = zip(computations, computations[1:], strict=False)
        self._at_once = frozenset(
            at for (kind, at), after in following if kind == "forward" and after == ("backward", at)
        )
        self._flights.clear()

    def begin_forward(self, at: At) -> None:
        """What is saved from now on belongs to this microbatch and chunk."""
        self._learn(self._current)
        self._current = self._flights[at] = InFlightOffloads(at)
        groups = self._learnt.get(at[1])
        if groups is not None:
            keep_last = at in self._at_once
            self._current.send = to_send(
                groups,
                fraction=self.config.activation_offload_fraction,
                stay_bytes=self._stay_bytes,
                keep_last=keep_last,
            )

    def open(self, module: str) -> "_Collecting":
        """A new group: the policy of the scope in which its module runs."""
        flight = self._current
        group = OffloadGroup(module, flight, len(flight.groups))
        flight.groups.append(group)
        return _Collecting(self, group)

    def take(self, tensor: Tensor, group: OffloadGroup) -> PackedTensor | None:
        """The tensor as part of the group; None: it stays where it is."""
        base = tensor if tensor._base is None else tensor._base
        is_parameter = base.is_leaf and base.requires_grad
        if is_parameter or tensor.numel() < self.config.min_offloaded_tensor_size:
            return None
        moved = self._moved(tensor, group)
        return _Ticket(self, group, moved, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _moved(self, tensor: Tensor, group: OffloadGroup) -> OffloadedTensor:
        key, known = (storage_of(tensor), tensor.dtype), group.flight.known
        reference, moved = known.get(key, (None, None))
        found = None if reference is None or moved is None or reference.expired() else moved()
        if found is None:
            found = OffloadedTensor(tensor, self.pool)
            known[key] = StorageWeakRef(tensor.untyped_storage()), ref(found)
            group.moved.append(ref(found))
            group.nbytes += found.nbytes
        return found

    def close(self, group: OffloadGroup) -> None:
        """The module has run: its group sets out, if it is to."""
        wanted = group.flight.send
        if wanted is not None and group.number not in wanted:
            return
        group.sent = bool(group.moved)
        leaving = self._leaving.setdefault(group.module, deque())
        for reference in group.moved:
            moved = reference()
            if moved is not None:
                leaving.append(moved.send())
        while (
            self.config.fine_grained_offloading_max_inflight_offloads is not None
            and len(leaving) > self.config.fine_grained_offloading_max_inflight_offloads
        ):
            self.pool.copies.wait(leaving.popleft())

    def needed(self, group: OffloadGroup) -> None:
        """The backward has come to a group: it must be here, and the one before it sets out."""
        group.fetch()
        flight = group.flight
        if not flight.fetch_before(group.number) and flight.at in self._after:
            after = self._flights.get(self._after[flight.at])
            if after is not None and after is not self._current:
                after.fetch_before(len(after.groups))

    def _learn(self, flight: InFlightOffloads) -> None:
        if flight.groups:
            self._learnt[flight.at[1]] = tuple((group.module, group.nbytes) for group in flight.groups)


@dataclass(frozen=True)
class _Collecting:
    """The policy of one group's scope."""

    offload: ActivationOffload
    group: OffloadGroup

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        return self.offload.take(tensor, self.group)

    def close(self) -> None:
        self.offload.close(self.group)


def to_send(groups: Sequence[tuple[str, int]], *, fraction: float, stay_bytes: int, keep_last: bool) -> frozenset[int]:
    """Which of the groups (module, bytes) of a forward wait on the host: the first `fraction` of them, but not the last
    ones as far as `stay_bytes` are to stay, and with `keep_last` not the last of any module."""
    first = groups[: ceil(fraction * len(groups))]
    last = {module: number for number, (module, _) in enumerate(groups)} if keep_last else {}
    chosen = [number for number, (module, _) in enumerate(first) if last.get(module) != number]
    while chosen and stay_bytes > 0:
        stay_bytes -= groups[chosen.pop()][1]
    return frozenset(chosen)
