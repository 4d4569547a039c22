"""Console output: plain lines, or on a terminal one live line of progress below the lines."""

import os
import sys
from collections import deque
from datetime import timedelta
from statistics import median
from typing import Any, Protocol

from megatron_moe.logs.interval import IntervalReading

_RECENT_STEPS = 20
"""Speed and time left follow from the median of so many steps, which a compiling first step does not move."""


class Console(Protocol):
    """Prints lines and shows progress."""

    def start(self, iteration: int, last_iteration: int) -> None: ...
    def write(self, line: str) -> None: ...
    def progress(self, reading: IntervalReading) -> None: ...
    def close(self) -> None: ...


class PlainConsole:
    """One line after another."""

    def start(self, iteration: int, last_iteration: int) -> None:
        """Nothing to prepare."""

    def write(self, line: str) -> None:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # The reader of a pipe left. What is still buffered goes nowhere, or the interpreter fails at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            raise

    def progress(self, reading: IntervalReading) -> None:
        """Shown by the lines alone."""

    def close(self) -> None:
        """Nothing to put back."""


class LiveConsole:
    """Lines above a live one with iteration, loss, tokens/s and time left. Only for a terminal."""

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length
        self._last_iteration = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._live: Any = None
        self._task: Any = None

    def start(self, iteration: int, last_iteration: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._last_iteration = last_iteration
        self._live = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            refresh_per_second=4,
        )
        self._task = self._live.add_task("", total=last_iteration, completed=iteration)
        self._live.start()

    def write(self, line: str) -> None:
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, reading: IntervalReading) -> None:
        self._seconds.append(reading.seconds)
        seconds = median(self._seconds)
        speed = reading.num_samples * self._seq_length / max(seconds, 1e-9)
        left = timedelta(seconds=round((self._last_iteration - reading.iteration) * seconds))
        text = f"loss {reading.loss:.4f}  {speed:,.0f} tokens/s  {left} left"
        self._live.update(self._task, completed=reading.iteration, description=text)

    def close(self) -> None:
        """Ends the live line, which stays, so that the cursor and the lines after it are in order."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def has_live_line() -> bool:
    """Whether standard output is a terminal whose last line can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
