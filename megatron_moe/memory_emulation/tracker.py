"""Follows every piece of memory that a run takes and gives back, and says what was there at the fullest moment.

Works on the storages behind tensors, whatever they are made of: real ones, or fake ones that have sizes only. What the
caching allocator does to sizes is in `rounded`; fragmentation is not.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Phase = Literal["setup", "forward", "backward", "update"]

BLOCK = 512
"""Bytes that the CUDA allocator rounds up to."""


def rounded(num_bytes: int) -> int:
    """What the CUDA allocator counts for a tensor of so many bytes."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass
class TrackedPiece:
    """A storage from its first use to its end. Times are numbers of events."""

    bytes: int
    phase: Phase
    """In which it was made."""
    label: str
    """Of the module that made it; empty: none did."""
    born: int
    state: str = ""
    """Kind of what stays from step to step; empty: it does not."""
    died: int | None = None
    outlived: bool = False
    """Autograd was at work between its birth and its death."""

    @property
    def category(self) -> str:
        """What it was for, known when it is over."""
        if self.state:
            return self.state
        if self.phase == "setup":
            return "other"
        if self.died is None:
            return "other"
        if self.phase == "forward" and self.outlived:
            return "activations"
        return "dispatch" if self.label == "dispatch" else "workspace"


CATEGORIES = ("weights", "gradients", "master weights", "moments", "activations", "dispatch", "workspace", "other")
"""In the order in which they are shown."""
HOST = "host"
"""State that waits in host memory: of no category, and part of no total."""


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes at one moment."""

    event: int
    total: int
    categories: Mapping[str, int]
    modules: Mapping[tuple[str, str], int]
    """(category, label)."""
    phase: Phase


@dataclass(frozen=True)
class Timeline:
    """All pieces of a run, and what follows from them."""

    pieces: tuple[TrackedPiece, ...]
    begin: int
    """Event from which on a peak counts."""
    num_events: int
    phases: tuple[Phase, ...] = field(repr=False)
    """Of every event."""

    def totals(self) -> list[int]:
        """Bytes after every event."""
        change = [0] * self.num_events
        for piece in self._on_device():
            change[piece.born] += piece.bytes
            if piece.died is not None:
                change[piece.died] -= piece.bytes
        total, totals = 0, []
        for difference in change:
            total += difference
            totals.append(total)
        return totals

    def _on_device(self) -> Iterator[TrackedPiece]:
        return (piece for piece in self.pieces if piece.state != HOST)

    def peak(self) -> MemoryPeak:
        """The fullest moment."""
        totals = self.totals()
        return self.at(max(range(self.begin, self.num_events), key=totals.__getitem__))

    def at(self, event: int) -> MemoryPeak:
        """What is there after an event."""
        categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        modules: dict[tuple[str, str], int] = defaultdict(int)
        for piece in self._on_device():
            if piece.born <= event and (piece.died is None or piece.died > event):
                category = piece.category
                categories[category] += piece.bytes
                modules[category, _holder(category, piece.label)] += piece.bytes
        return MemoryPeak(event, sum(categories.values()), categories, dict(modules), self.phases[event])

    def curves(self, num_points: int) -> tuple[list[int], dict[str, list[int]]]:
        """(events, bytes by category) at about so many moments from `begin` on; of every stretch the fullest one."""
        totals = self.totals()
        width = max((self.num_events - self.begin) // num_points, 1)
        starts = range(self.begin, self.num_events, width)
        events = [max(range(s, min(s + width, self.num_events)), key=totals.__getitem__) for s in starts]
        curves = {name: [0] * len(events) for name in CATEGORIES}
        for name in CATEGORIES:
            change = [0] * (self.num_events + 1)
            for piece in self.pieces:
                if piece.category == name:
                    change[piece.born] += piece.bytes
                    if piece.died is not None:
                        change[piece.died] -= piece.bytes
            total, place = 0, 0
            for event, wanted in enumerate(events):
                while place <= wanted:
                    total += change[place]
                    place += 1
                curves[name][event] = total
        return events, curves


def _holder(category: str, label: str) -> str:
    """Rows that the backward needs are the experts', whoever made them."""
    return "experts" if (category, label) == ("activations", "dispatch") else label


class Tracker(TorchDispatchMode):
    """Sees every tensor that comes out of an operation while it is active.

    Args:
        device_type: storages of other devices do not count; None: all do.
    """

    def __init__(self, *, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self._pieces: list[TrackedPiece] = []
        self._alive: dict[int, TrackedPiece] = {}
        """By address of the storage."""
        self._phases: list[Phase] = []
        self._phase: Phase = "setup"
        self._last_backward = -1
        """The latest event while autograd was at work."""
        self._labels: list[str] = []
        self._begin = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:  # what was made of numbers on the host comes out of no operation
            if isinstance(argument, Tensor):
                self._see(argument)
            elif isinstance(argument, tuple | list):
                for each in argument:
                    if isinstance(each, Tensor):
                        self._see(each)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, tuple | list):
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self._see(each)
        return result

    @property
    def phase(self) -> Phase:
        """What the run is doing."""
        in_graph: bool = torch._C._current_graph_task_id() != -1
        return "backward" if in_graph else self._phase

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The body is this phase; what autograd does is always "backward"."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def within(self, label: str) -> Iterator[None]:
        """What the body takes is labelled; the innermost label counts."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def is_state(self, tensor: Tensor, kind: str) -> None:
        """The storage of a tensor stays from step to step."""
        self._see(tensor)
        piece = self._alive.get(tensor.untyped_storage()._cdata)
        if piece is not None and not piece.state:
            piece.state = kind

    def begin(self) -> None:
        """A peak counts from here on."""
        self._begin = max(len(self._phases) - 1, 0)

    def timeline(self) -> Timeline:
        """Of everything so far."""
        return Timeline(tuple(map(replace, self._pieces)), self._begin, len(self._phases), tuple(self._phases))

    def _see(self, tensor: Tensor) -> None:
        if self._device_type is not None and tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        piece = self._alive.get(key)
        size = rounded(storage.nbytes())
        if piece is not None:
            if piece.bytes != size:
                self._resized(key, piece, size)
            return
        if size:
            self._new(key, size, self.phase, self._labels[-1] if self._labels else "")
            weakref.finalize(storage, self._end, key).atexit = False

    def _new(self, key: int, size: int, phase: Phase, label: str, state: str = "") -> None:
        piece = TrackedPiece(size, phase, label, self._event(), state)
        self._alive[key] = piece
        self._pieces.append(piece)

    def _end(self, key: int) -> None:
        piece = self._alive.pop(key, None)
        if piece is not None:
            self._die(piece)

    def _resized(self, key: int, piece: TrackedPiece, size: int) -> None:
        """A storage that grew or shrank in place is the end of one piece and perhaps the beginning of another."""
        self._die(piece)
        del self._alive[key]
        if size:
            self._new(key, size, piece.phase, piece.label, piece.state)

    def _die(self, piece: TrackedPiece) -> None:
        piece.died = self._event()
        piece.outlived = self._last_backward > piece.born

    def _event(self) -> int:
        phase = self.phase
        self._phases.append(phase)
        if phase == "backward":
            self._last_backward = len(self._phases) - 1
        return len(self._phases) - 1
