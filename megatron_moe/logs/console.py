"""What the person at the terminal sees: plain lines, or the same lines above a progress bar."""

import os
import sys
from typing import Any, Protocol

from megatron_moe.logs.interval import Reading


class Console(Protocol):
    """Shows lines and how far the run has come."""

    def start(self, iteration: int, last_iteration: int) -> None: ...
    def write(self, line: str) -> None: ...
    def progress(self, reading: Reading) -> None: ...
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

    def progress(self, reading: Reading) -> None:
        """Lines alone tell."""

    def close(self) -> None:
        """Nothing to put back."""


class BarConsole:
    """Lines above a bar with loss, speed and time left. Only for a terminal."""

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length
        self._bar: Any = None
        self._task: Any = None

    def start(self, iteration: int, last_iteration: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("training", total=last_iteration, completed=iteration, news="")
        self._bar.start()

    def write(self, line: str) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, reading: Reading) -> None:
        speed = reading.num_samples * self._seq_length / max(reading.seconds, 1e-9)
        self._bar.update(self._task, completed=reading.iteration, news=f"loss {reading.loss:.4f}  {speed:,.0f} tok/s")

    def close(self) -> None:
        """Takes the bar down, so that the cursor and the lines after it are in order."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_console(*, wants_bar: bool, seq_length: int) -> Console:
    """A bar when it is wanted and someone looks; plain lines in a file or a pipe."""
    if wants_bar and sys.stdout.isatty():
        return BarConsole(seq_length)
    return PlainConsole()
