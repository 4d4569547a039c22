"""Tracks every allocation and release of tensor memory in a run and reports the memory at the peak.

Works on tensor storages, real or `meta`. `allocation_size` models the rounding of the CUDA caching allocator;
fragmentation is not modelled.
"""

import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Phase = Literal["setup", "forward", "backward", "update"]

BLOCK = 512
"""Allocation granularity of the CUDA caching allocator in bytes."""


def allocation_size(num_bytes: int) -> int:
    """Tensor size in bytes, rounded up to the allocation granularity of the CUDA caching allocator."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass
class TrackedStorage:
    """Size and lifetime of one tensor storage. `born` and `died` are indices of events (allocations and releases)."""

    bytes: int
    phase: Phase
    """Phase of the step in which the storage was allocated."""
    label: str
    """Label of the module that allocated the storage; empty if allocated outside all modules."""
    born: int
    state: str = ""
    """Kind of persistent state, for example "weights"; empty if not persistent."""
    died: int | None = None
    outlived: bool = False
    """Whether a backward pass ran during the storage's lifetime."""
    pool: int | None = None
    """CUDA-graph pool of the storage; None if it was allocated outside captured graphs."""

    @property
    def category(self) -> str:
        """Memory category: `state` if set; otherwise derived from phase, label and lifetime of the storage."""
        if self.state:
            return self.state
        if self.pool is not None:
            return GRAPHS
        if self.phase == "setup" or self.died is None:
            return "other"
        if self.phase == "forward" and self.outlived:
            return "activations"
        return "dispatch" if self.label == "dispatch" else "workspace"


GRAPHS = "graph pools"
"""Category of the memory that captured graphs allocate and keep."""
CATEGORIES = (
    "weights", "gradients", "master weights", "moments", "activations", "dispatch", "workspace", GRAPHS, "other"
)  # fmt: skip
"""Memory categories in display order."""
HOST = "host"
"""Value of `TrackedStorage.state` for buffers in host memory. Categories and totals do not include them."""


@dataclass(frozen=True)
class MemoryPeak:
    """Breakdown of the live bytes after one event."""

    event: int
    total: int
    categories: Mapping[str, int]
    modules: Mapping[tuple[str, str], int]
    """(category, module label) -> live bytes."""
    phase: Phase


@dataclass(frozen=True)
class Timeline:
    """All storages of a run and methods that compute live bytes. An event is an allocation or release of a storage.

    The bytes of a CUDA-graph pool stay allocated: they count as live from the event at which the pool needed them.
    """

    storages: tuple[TrackedStorage, ...]
    begin: int
    """Index of the first event of the interval over which the peak is computed."""
    num_events: int
    phases: tuple[Phase, ...] = field(repr=False)
    """Phase of every event."""

    def live_bytes(self) -> list[int]:
        """Live bytes after every event."""
        outside = self._sums(
            storage for storage in self.storages if storage.state != HOST and storage.category != GRAPHS
        )
        return list(map(sum, zip(outside, *self._pools().values(), strict=True)))

    def pool_bytes(self, pools: Container[int] | None = None) -> int:
        """Memory of CUDA-graph pools at the end, in bytes. `pools`: their numbers; None means all."""
        return sum(sizes[-1] for pool, sizes in self._pools().items() if pools is None or pool in pools)

    def _pools(self) -> dict[int, list[int]]:
        """CUDA-graph pool -> its bytes after every event, which never decrease."""
        members: dict[int, list[TrackedStorage]] = defaultdict(list)
        for storage in self.storages:
            if storage.category == GRAPHS and storage.pool is not None:
                members[storage.pool].append(storage)
        return {pool: list(accumulate(self._sums(storages), max)) for pool, storages in members.items()}

    def _sums(self, storages: Iterable[TrackedStorage]) -> list[int]:
        """Live bytes of the given storages after every event."""
        change = [0] * self.num_events
        for storage in storages:
            change[storage.born] += storage.bytes
            if storage.died is not None:
                change[storage.died] -= storage.bytes
        return list(accumulate(change))

    def peak(self) -> MemoryPeak:
        """Breakdown of the live bytes after the event with the largest total, searched from event `begin` on."""
        totals = self.live_bytes()
        return self.breakdown_at(max(range(self.begin, self.num_events), key=totals.__getitem__))

    def breakdown_at(self, event: int) -> MemoryPeak:
        """Breakdown of the live bytes after an event."""
        categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        modules: dict[tuple[str, str], int] = defaultdict(int)
        for storage in self.storages:
            if storage.state != HOST and storage.born <= event and (storage.died is None or storage.died > event):
                category = storage.category
                categories[category] += storage.bytes
                # dispatched rows that are saved for backward are inputs of the experts
                label = "experts" if (category, storage.label) == ("activations", "dispatch") else storage.label
                modules[category, label] += storage.bytes
        reserved = sum(sizes[event] for sizes in self._pools().values())
        if reserved > categories[GRAPHS]:
            modules[GRAPHS, "free for replays"] = reserved - categories[GRAPHS]
            categories[GRAPHS] = reserved
        return MemoryPeak(event, sum(categories.values()), categories, dict(modules), self.phases[event])

    def curves(self, num_points: int) -> tuple[list[int], dict[str, list[int]]]:
        """Returns (events, category -> live bytes after each of these events). Events are divided into about
        `num_points` intervals; the event with the most live bytes of each interval is returned."""
        totals = self.live_bytes()
        width = max((self.num_events - self.begin) // num_points, 1)
        starts = range(self.begin, self.num_events, width)
        events = [max(range(s, min(s + width, self.num_events)), key=totals.__getitem__) for s in starts]
        curves = {}
        for name in CATEGORIES:
            sums = self._sums(storage for storage in self.storages if storage.category == name)
            if name == GRAPHS:
                sums = list(map(sum, zip(*self._pools().values(), strict=True))) or sums
            curves[name] = [sums[event] for event in events]
        return events, curves


class Tracker(TorchDispatchMode):
    """Dispatch mode that records allocation and release of the storages of all tensors that operations read or return.

    `device_type`: device type of the tracked storages; None means all device types.
    """

    def __init__(self, *, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self._storages: list[TrackedStorage] = []
        self._alive: dict[int, TrackedStorage] = {}
        """Live storages by the address of the storage object (`_cdata`)."""
        self._emptied: dict[int, TrackedStorage] = {}
        """Storages that were resized to no bytes and may grow again."""
        self._phases: list[Phase] = []
        self._phase: Phase = "setup"
        self._last_backward = -1
        """Index of the latest event in a backward pass."""
        self._labels: list[str] = []
        self._pool: int | None = None
        self._begin = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """If True, torch's default, the first operation imports the compiler, which takes seconds, and every operation
        passes through a wrapper that stops compilation. Nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see_all(args)  # tensors created from host values appear only as inputs
        result = func(*args, **(kwargs or {}))
        self._see_all(result)
        return result

    def _see_all(self, values: Any) -> None:
        if isinstance(values, Tensor):
            self._see(values)
        elif isinstance(values, tuple | list):
            for value in values:
                self._see_all(value)

    @property
    def phase(self) -> Phase:
        """Phase of the current operation: "backward" inside a backward pass, otherwise the phase set by `in_phase`."""
        in_graph: bool = torch._C._current_graph_task_id() != -1
        return "backward" if in_graph else self._phase

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Sets the phase of operations in the body, except those in a backward pass, whose phase is "backward"."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def with_label(self, label: str) -> Iterator[None]:
        """Labels allocations in the body; the innermost label wins."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    @contextmanager
    def in_pool(self, pool: int) -> Iterator[None]:
        """Counts allocations in the body in a CUDA-graph pool."""
        before, self._pool = self._pool, pool
        try:
            yield
        finally:
            self._pool = before

    def mark_persistent(self, tensor: Tensor, kind: str) -> None:
        """Marks the storage of a tensor as persistent state of this kind, unless it is marked already."""
        self._see(tensor)
        key = tensor.untyped_storage()._cdata
        record = self._alive.get(key) or self._emptied.get(key)
        if record is not None and not record.state:
            record.state = kind

    def ignore(self, tensor: Tensor) -> None:
        """Excludes a tensor from all totals, because another tensor already accounts for its memory."""
        self.mark_persistent(tensor, HOST)

    def begin_peak_interval(self) -> None:
        """Starts the interval over which the peak is computed."""
        self._begin = max(len(self._phases) - 1, 0)

    def timeline(self) -> Timeline:
        """Returns the timeline of all events so far."""
        return Timeline(tuple(map(replace, self._storages)), self._begin, len(self._phases), tuple(self._phases))

    def _see(self, tensor: Tensor) -> None:
        if self._device_type is not None and tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._alive.get(key)
        size = allocation_size(storage.nbytes())
        if record is not None:
            if record.bytes != size:  # resized in place
                self._end(key)
                if size:
                    self._new(key, size, record.phase, record.label, record.state)
                else:
                    self._emptied[key] = record
        elif size and (emptied := self._emptied.pop(key, None)) is not None:
            self._new(key, size, emptied.phase, emptied.label, emptied.state)
        elif size:
            self._new(key, size, self.phase, self._labels[-1] if self._labels else "")
            weakref.finalize(storage, self._forget, key).atexit = False

    def _new(self, key: int, size: int, phase: Phase, label: str, state: str = "") -> None:
        record = TrackedStorage(size, phase, label, self._event(), state, pool=self._pool)
        self._alive[key] = record
        self._storages.append(record)

    def _forget(self, key: int) -> None:
        self._emptied.pop(key, None)
        self._end(key)

    def _end(self, key: int) -> None:
        record = self._alive.pop(key, None)
        if record is not None:
            record.died = self._event()
            record.outlived = self._last_backward > record.born

    def _event(self) -> int:
        phase = self.phase
        self._phases.append(phase)
        if phase == "backward":
            self._last_backward = len(self._phases) - 1
        return len(self._phases) - 1
