"""Named timers with Megatron's levels and output format. On a GPU they record events and never synchronise."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Literal

import torch

from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

Option = Literal["max", "minmax", "all"]
_NAME_COLUMNS = 48


class Timestamp:
    """Timestamp taken at construction: host time on a CPU, an event recorded on the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def synchronize(self) -> None:
        """Blocks the host until the GPU has reached the event; returns immediately on a CPU."""
        if self._event is not None:
            self._event.synchronize()

    def has_completed(self) -> bool:
        """True if the GPU has reached the event (always on a CPU). Does not block."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: "Timestamp") -> float:
        """Seconds from `earlier` to this timestamp. On a GPU, both events must have completed."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class Span:
    """Named time between two timestamps. A backward span begins at the last call of `mark_begin` before the first call
    of `mark_end`, and ends at the last call of `mark_end`. Without calls of both, it is not counted."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._begin: Timestamp | None = None
        self._end: Timestamp | None = None

    def mark_begin(self, *_: object) -> None:
        if self._end is None:
            self._begin = Timestamp(self._device)

    def mark_end(self, *_: object) -> None:
        self._end = Timestamp(self._device)

    def is_over(self) -> bool:
        """False if the device has not reached the end. Does not block."""
        return self._end is None or self._end.has_completed()

    def seconds(self) -> float:
        """Duration in seconds; 0 for a backward that did not run."""
        return 0.0 if self._begin is None or self._end is None else self._end.seconds_since(self._begin)


class Timers:
    """Measures the time of named spans. Spans with a level above `--timing-log-level` are not measured."""

    def __init__(self, level: int, device: torch.device) -> None:
        self._level = level
        self._device = device
        self._steps: list[list[Span]] = [[]]
        """Spans of each step that `gather_seconds` has not returned yet."""

    @property
    def times_nodes(self) -> bool:
        """True if the nodes of layers are measured (level 2)."""
        return self._level >= 2

    def begin_step(self) -> None:
        """Assigns the following spans to a new step."""
        if self._level:
            self._steps.append([])

    @contextmanager
    def span(self, name: str, level: int) -> Iterator[None]:
        """Context manager that measures its body: host time on a CPU, time on the current stream on a GPU."""
        if level > self._level:
            yield
            return
        span = Span(name, self._device)
        span.mark_begin()
        try:
            yield
        finally:
            span.mark_end()
            self._steps[-1].append(span)

    def backward_span(self, name: str, level: int) -> Span | None:
        """Returns a span of the current step whose ends the backward marks; None if `span` would do nothing."""
        if level > self._level:
            return None
        self._steps[-1].append(Span(name, self._device))
        return self._steps[-1][-1]

    def gather_seconds(self, context: ParallelContext) -> dict[str, list[float]]:
        """Returns the mean seconds per step of each rank, by span name, over the steps that ended since the last call.

        Does not wait for the device: steps that it has not completed are returned by a later call. Collective over all
        ranks, unless timers are off (level 0); the result is then empty.
        """
        if self._level == 0:
            return {}
        ended = list(takewhile(lambda spans: all(span.is_over() for span in spans), self._steps))
        self._steps = self._steps[len(ended) :] or [[]]
        num_steps = sum(map(bool, ended))
        seconds: dict[str, float] = {}
        for span in chain.from_iterable(ended):
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds() / num_steps
        # collective over world, in host memory: a few hundred bytes per rank
        ranks = gather_objects(seconds, context.host_group())
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: [rank.get(name, 0.0) for rank in ranks] for name in names}


def timer_lines(timings: Mapping[str, Sequence[float]], option: Option) -> list[str]:
    """Formats timings (name -> seconds of each rank) as Megatron's timer lines in ms; empty if there are none."""
    if not timings:
        return []
    timings = {name: [seconds * 1e3 for seconds in ranks] for name, ranks in timings.items()}
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, ranks in timings.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(ranks)]
        return lines
    shown = {
        name: f"{max(ranks):.2f}" if option == "max" else f"({min(ranks):.2f}, {max(ranks):.2f})"
        for name, ranks in timings.items()
    }
    title = "max time" if option == "max" else "(min, max) time"
    return [
        f"{title} across ranks (ms):",
        *(f"    {f'{name} '.ljust(_NAME_COLUMNS, '.')}: {text}" for name, text in shown.items()),
    ]
