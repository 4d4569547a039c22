"""Offload of saved activations of selected modules to host memory.

The tensors that one call of a module saves form a group. The group is copied to the host while the following modules
run. When a group's backward begins, the offloaded group whose backward comes next is copied back. If the backward of a
microbatch immediately follows its forward, the last group of every module stays on the device, because no computation
could overlap its copies. The first forward of a model chunk measures its groups and offloads all of them.

A storage is offloaded once, even if several tensors or views of it are saved. Parameters are not offloaded.

A CUDA graph of a whole step captures the copies too. A captured copy uses a host buffer of the `BufferPool`, which
keeps its address for the whole run. The allocator reuses no memory that a captured side stream has used, so device
memory is freed only after the compute stream has waited for its copy (`fine_grained_offloading_max_inflight_offloads`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_moe.config.memory import ActivationOffloadConfig
from megatron_moe.memory.output_discard import PackedTensor, PackedView, storage_id
from megatron_moe.parallel.streams import Event, HostCopies

At = tuple[int, int]
"""Indices (microbatch, model chunk)."""


class BufferPool:
    """Pool of host buffers for offloaded tensors. A freed buffer is reused after its last copy has finished."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Event]]] = defaultdict(list)
        self.num_buffers = 0
        """Number of host buffers allocated so far."""
        self.bytes_to_host = 0
        self.bytes_to_device = 0

    def offload(self, flat: Tensor, *, free_source: bool) -> tuple[Tensor, Event]:
        """Starts a copy of `flat` to the host; returns (host buffer, end event). `free_source`: allows the caller to
        free `flat` immediately; otherwise it must be kept until the compute stream has waited for the event."""
        free = self._free[flat.numel(), flat.dtype]
        if free:
            buffer, read = free.pop()
        else:
            buffer, read = self.copies.host_buffer(flat.numel(), flat.dtype, exact=False), None
            self.num_buffers += 1
        self.bytes_to_host += flat.nbytes
        return buffer, self.copies.to_host(buffer, flat, read, free_source=free_source)

    def reload(self, buffer: Tensor, written: Event, device: torch.device) -> tuple[Tensor, Event]:
        """Starts a copy of `buffer` to the device after the event `written`; returns (device tensor, end event). The
        compute stream must wait for the event before the tensor is used or freed."""
        self.bytes_to_device += buffer.nbytes
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=device)
        # work queued so far may still use the memory that was just allocated
        allocated = self.copies.record()
        return flat, self.copies.to_device(flat, buffer, allocated, written)

    def free(self, buffer: Tensor, read: Event) -> None:
        """Puts a buffer back into the pool. The next copy to the buffer starts after the event `read`."""
        self._free[buffer.numel(), buffer.dtype].append((buffer, read))

    def finish_pass(self) -> None:
        """Drops the events of all buffers, because later copies follow on the same streams. A captured copy cannot wait
        for an event of an eager step, nor the reverse."""
        num_free = 0
        for key, entries in self._free.items():
            self._free[key] = [(buffer, None) for buffer, _ in entries]
            num_free += len(entries)
        assert num_free == self.num_buffers, f"{self.num_buffers - num_free} host buffers are in use after a pass"


@dataclass(frozen=True)
class InFlight:
    """Copy of a tensor that the compute stream has not waited for, and the device tensor if it must stay allocated
    until then."""

    at: At
    done: Event
    tensor: Tensor | None


class OffloadedTensor:
    """Storage of saved tensors, on the device, the host or both. It is freed with the last tensor that uses it."""

    def __init__(self, tensor: Tensor, pool: BufferPool, unused: list[InFlight], at: At) -> None:
        """`unused`: list to which the copy to the device is added if the storage is freed without having been used.
        `at`: forward that saves the tensor."""
        num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._flat: Tensor | None = tensor.detach().as_strided((num_elements,), (1,), 0)
        self._device = tensor.device
        self._pool = pool
        self._buffer: Tensor | None = None
        self._copied: Event = None
        self._reloading = False
        """Whether a copy to the device has been started and the compute stream has not waited for it."""
        self._unused, self._at = unused, at
        self.nbytes = self._flat.nbytes

    def offload(self, *, keep: bool) -> InFlight:
        """Starts the copy to the host. `keep`: keeps the device memory until the result is released; otherwise it is
        freed at the end of the copy."""
        flat, self._flat = self._flat, None
        assert flat is not None, "offloaded twice"
        self._buffer, self._copied = self._pool.offload(flat, free_source=not keep)
        return InFlight(self._at, self._copied, flat if keep else None)

    def reload(self) -> None:
        """Starts the copy to the device, unless the data is on the device or the copy has been started."""
        if self._flat is None:
            assert self._buffer is not None, "offloaded tensor is neither on the device nor on the host"
            self._flat, self._copied = self._pool.reload(self._buffer, self._copied, self._device)
            self._reloading = True

    def on_device(self) -> Tensor:
        """Returns the storage as a flat device tensor, reloaded if necessary. The current stream waits for the copy."""
        self.reload()
        assert self._flat is not None
        if self._reloading:
            self._pool.copies.wait(self._copied)
            self._reloading = False
        return self._flat

    def __del__(self) -> None:
        if self._reloading:
            self._unused.append(InFlight(self._at, self._copied, self._flat))
        if self._buffer is not None:
            self._pool.free(self._buffer, self._copied)


@dataclass(eq=False)
class OffloadGroup:
    """Tensors saved by one call of a module. Implements `saved_tensors.Policy`, which applies during the call."""

    offload: "ActivationOffload"
    module: str
    microbatch: "MicrobatchOffloads"
    index: int
    """Index among the groups of the microbatch."""
    tensors: list[ReferenceType[OffloadedTensor]] = field(default_factory=list)
    offloaded: bool = False
    nbytes: int = 0

    def live_tensors(self) -> list[OffloadedTensor]:
        """Tensors of the group that the autograd graph still references."""
        return [tensor for tensor in (reference() for reference in self.tensors) if tensor is not None]

    def reload(self) -> None:
        for tensor in self.live_tensors():
            tensor.reload()

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """Adds a saved tensor to the group and returns its packed form; None for parameters and small tensors."""
        base = tensor if tensor._base is None else tensor._base
        is_parameter = base.is_leaf and base.requires_grad
        if is_parameter or tensor.numel() < self.offload.config.min_offloaded_tensor_size:
            return None
        return PackedView.of(tensor, partial(self._unpack, self._offloaded_tensor(tensor)))

    def close(self) -> None:
        """Starts to offload the group if it is selected. Called after the forward of the module."""
        self.offload.end_group(self)

    def _unpack(self, tensor: OffloadedTensor) -> Tensor:
        self.offload.begin_backward(self)
        return tensor.on_device()

    def _offloaded_tensor(self, tensor: Tensor) -> OffloadedTensor:
        key, known = (storage_id(tensor), tensor.dtype), self.microbatch.known
        storage, reference = known.get(key, (None, None))
        found = None if storage is None or reference is None or storage.expired() else reference()
        if found is None:
            found = OffloadedTensor(tensor, self.offload.pool, self.offload.unused, self.microbatch.at)
            known[key] = StorageWeakRef(tensor.untyped_storage()), ref(found)
            self.tensors.append(ref(found))
            self.nbytes += found.nbytes
        return found


@dataclass(eq=False)
class MicrobatchOffloads:
    """Offload groups of one microbatch in one model chunk, in the order of the forward."""

    at: At
    groups: list[OffloadGroup] = field(default_factory=list)
    known: dict[tuple[int, torch.dtype], tuple[StorageWeakRef, ReferenceType[OffloadedTensor]]] = field(
        default_factory=dict
    )
    """Tensors by (storage identifier, dtype). The StorageWeakRef prevents reuse of the identifier."""
    selected: frozenset[int] | None = None
    """Indices of the groups to offload. None means that all groups are offloaded."""

    def reload_before(self, index: int) -> bool:
        """Starts to reload the last offloaded group with an index below `index`. Returns False if there is none."""
        for group in reversed(self.groups[:index]):
            if group.offloaded:
                group.reload()
                return True
        return False


class ActivationOffload:
    """Selects the groups to offload and schedules their copies; each rank has one object."""

    def __init__(self, config: ActivationOffloadConfig, copies: HostCopies, *, stay_bytes: int = 0) -> None:
        """`stay_bytes`: minimum bytes per microbatch and chunk that stay on the device; see `select_groups`."""
        self.config = config
        self.pool = BufferPool(copies)
        self._stay_bytes = stay_bytes
        self._microbatches: dict[At, MicrobatchOffloads] = {}
        self._current = MicrobatchOffloads((0, 0))
        self._learned: dict[int, tuple[tuple[str, int], ...]] = {}
        """Model chunk -> (module name, bytes) of every group of the chunk's last forward, from which the next selection
        is made."""
        self._next_backward: Mapping[At, At] = {}
        self._immediate: frozenset[At] = frozenset()
        """(microbatch, chunk) pairs whose backward immediately follows their forward on this rank."""
        self._in_flight: dict[str, deque[InFlight]] = defaultdict(deque)
        """Module -> its copies to the host that the compute stream has not waited for, if their number is limited."""
        self.unused: list[InFlight] = []
        """Copies to the device of tensors that were freed before their use."""
        self._delayed: list[OffloadGroup] = []
        """Selected groups whose copies start after the next replay."""

    def begin_pass(self, computations: Sequence[tuple[str, At]]) -> None:
        """Sets this rank's schedule for a step: an ordered list of ("forward" or "backward", (microbatch, chunk))."""
        backwards = [at for kind, at in computations if kind == "backward"]
        self._next_backward = dict(zip(backwards, backwards[1:], strict=False))
        following = zip(computations, computations[1:], strict=False)
        self._immediate = frozenset(
            at for (kind, at), after in following if kind == "forward" and after == ("backward", at)
        )
        self._microbatches.clear()
        self._delayed.clear()

    def finish_pass(self) -> None:
        """Makes the compute stream wait for all copies that nothing has waited for. Called at the end of a step."""
        self._release(lambda copy: True)
        for copy in self.unused:
            self.pool.copies.wait(copy.done)
        self.unused.clear()
        self.pool.finish_pass()

    def begin_forward(self, at: At) -> None:
        """Starts a forward and selects its groups to offload. Groups that are created afterwards belong to this
        forward."""
        done = self._current
        if done.groups:
            self._learned[done.at[1]] = tuple((group.module, group.nbytes) for group in done.groups)
        self._current = self._microbatches[at] = MicrobatchOffloads(at)
        groups = self._learned.get(at[1])
        if groups is not None:
            self._current.selected = select_groups(
                groups,
                fraction=self.config.activation_offload_fraction,
                stay_bytes=self._stay_bytes,
                keep_last=at in self._immediate,
            )

    def begin_group(self, module: str) -> OffloadGroup:
        """Creates the group of one call of the module, in the current microbatch and chunk."""
        microbatch = self._current
        group = OffloadGroup(self, module, microbatch, len(microbatch.groups))
        microbatch.groups.append(group)
        return group

    def end_group(self, group: OffloadGroup) -> None:
        """Starts to offload a group if it is selected, now or after the next replay."""
        selected = group.microbatch.selected
        if selected is not None and group.index not in selected:
            return
        if self.config.delay_offload_until_cuda_graph:
            self._delayed.append(group)
        else:
            self._start(group)

    def after_replay(self) -> None:
        """Starts the copies that were delayed until the replay of a captured module. Called after every replay."""
        delayed, self._delayed = self._delayed, []
        for group in delayed:
            self._start(group)

    def _start(self, group: OffloadGroup) -> None:
        """Starts to offload a group; limits the number of unfinished copies of its module."""
        group.offloaded = bool(group.tensors)
        limit, in_flight = self.config.fine_grained_offloading_max_inflight_offloads, self._in_flight[group.module]
        for tensor in group.live_tensors():
            copy = tensor.offload(keep=limit is not None)
            if limit is not None:
                in_flight.append(copy)
                if len(in_flight) > limit:
                    self.pool.copies.wait(in_flight.popleft().done)

    def _release(self, selects: Callable[[InFlight], bool]) -> None:
        """Makes the compute stream wait for the selected copies to the host and frees their device memory."""
        for module, in_flight in self._in_flight.items():
            for copy in filter(selects, in_flight):
                self.pool.copies.wait(copy.done)
            self._in_flight[module] = deque(copy for copy in in_flight if not selects(copy))

    def begin_backward(self, group: OffloadGroup) -> None:
        """Starts to reload `group`, whose backward has begun, and the offloaded group whose backward comes next. A
        group whose copies have not started stays on the device."""
        if group in self._delayed:
            self._delayed.remove(group)
        group.reload()
        microbatch = group.microbatch
        self._release(lambda copy: copy.at == microbatch.at)
        if not microbatch.reload_before(group.index) and microbatch.at in self._next_backward:
            following = self._microbatches.get(self._next_backward[microbatch.at])
            if following is not None and following is not self._current:
                following.reload_before(len(following.groups))


def select_groups(
    groups: Sequence[tuple[str, int]], *, fraction: float, stay_bytes: int, keep_last: bool
) -> frozenset[int]:
    """Returns the indices of the groups to offload in one forward. `groups`: (module name, bytes) of each group.

    Selects the first `fraction` of the groups, except the last group of every module if `keep_last`. Then removes
    groups from the end of the selection until the removed groups have at least `stay_bytes` in total.
    """
    first = groups[: ceil(fraction * len(groups))]
    last = {module: index for index, (module, _) in enumerate(groups)} if keep_last else {}
    selected = [index for index, (module, _) in enumerate(first) if last.get(module) != index]
    while selected and stay_bytes > 0:
        stay_bytes -= groups[selected.pop()][1]
    return frozenset(selected)
