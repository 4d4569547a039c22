"""Destinations of text and scalars: console, log.txt, metrics.jsonl, TensorBoard, Weights & Biases.

Every destination may fail at any time (full disk, lost network). `Guard` catches the exceptions, because a failure to
log must not stop training.
"""

import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.log_line import StepResult
from megatron_moe.logs.metrics_file import Record, encode, has_samples_variant

HOUR = 3600.0
_MAX_PENDING = 10_000
_RECENT_STEPS = 20
"""Number of recent steps whose median time gives the displayed speed and time left. The median ignores outliers."""
_SECONDS_BETWEEN_DRAWS = 0.25
_BAR_WIDTH = 20


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """Scalars of one iteration for all destinations. `samples`: number of samples consumed so far."""

    iteration: int
    samples: int
    tags: Mapping[str, float]
    """Scalars for TensorBoard and W&B, by tag."""
    record: Record | None = None
    """Record for metrics.jsonl; None if this iteration has none."""


class Sink(Protocol):
    """Interface of a destination of scalars: metrics.jsonl, TensorBoard or W&B."""

    name: str
    rest_seconds: float
    """Time in seconds after a failure during which `log` is not called; 0 if another attempt is cheap."""

    def log(self, entry: LogEntry) -> None: ...
    def close(self) -> None: ...


class Guard:
    """Runs logging functions and catches their exceptions; reports failures of a destination at most once per hour."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._reported_at: dict[str, float] = {}
        self._paused_until: dict[str, float] = {}

    def run(self, name: str, action: Callable[[], object], rest_seconds: float = 0.0) -> None:
        """Runs `action` and catches exceptions. Skips it for `rest_seconds` after a failure with the same `name`."""
        now = self._clock()
        if now < self._paused_until.get(name, now):
            return
        try:
            action()
        except Exception as error:
            self._paused_until[name] = now + rest_seconds
            if now - self._reported_at.get(name, -HOUR) >= HOUR:
                self._reported_at[name] = now
                self._report(
                    f"telemetry: {name} failed ({type(error).__name__}: {error}); training continues without it"
                )


class Console:
    """Prints plain lines to standard output, without progress display; for files and pipes."""

    def start(self, iteration: int, last_iteration: int) -> None:
        """Starts the progress display, if there is one, at `iteration`."""

    def write(self, line: str) -> None:
        """Prints a line."""
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # Discards the remaining buffer, which the interpreter would otherwise fail to flush at exit.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)
            raise

    def progress(self, result: StepResult) -> None:
        """Updates the progress display, if there is one, with the results of a step."""

    def close(self) -> None:
        """Ends the progress display, if there is one."""


class LiveConsole(Console):
    """Console that prints lines above a live line with iteration, loss, tokens/s and time left; needs a terminal.

    The live line is shorter than the terminal is wide. If the terminal becomes narrower, it may wrap the line, whose
    rows are all erased before the next one is drawn.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_iteration = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._text: str | None = None
        """Content of the live line; None before `start` and after `close`."""
        self._shown = ""
        """The live line as it was drawn; empty if it is not on the screen."""
        self._drawn_at = 0.0

    def start(self, iteration: int, last_iteration: int) -> None:
        self._last_iteration = last_iteration
        self._text = self._line(iteration, "")
        self._draw()

    def write(self, line: str) -> None:
        if self._text is None:
            super().write(line)
        else:
            super().write(f"{self._erasure()}{line}")
            self._shown = ""
            self._draw()

    def progress(self, result: StepResult) -> None:
        self._seconds.append(result.seconds)
        seconds = median(self._seconds)
        speed = result.num_tokens / max(seconds, 1e-9)
        left = timedelta(seconds=round((self._last_iteration - result.iteration) * seconds))
        self._text = self._line(result.iteration, f"loss {result.loss:.4f}  {speed:,.0f} tokens/s  {left} left")
        if self._clock() - self._drawn_at >= _SECONDS_BETWEEN_DRAWS or result.iteration == self._last_iteration:
            self._draw()

    def close(self) -> None:
        """Stops updating the live line, whose last state remains on the screen."""
        if self._text is not None:
            self._draw()
            super().write("")
            self._text = None

    def _line(self, iteration: int, text: str) -> str:
        filled = round(_BAR_WIDTH * iteration / max(self._last_iteration, 1))
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        return f"iteration {iteration}/{self._last_iteration} [{bar}] {text}"

    def _draw(self) -> None:
        assert self._text is not None, "the live line has not been started"
        erasure, self._shown = self._erasure(), self._text[: _columns() - 1]
        self._drawn_at = self._clock()
        print(f"{erasure}{self._shown}", end="", flush=True)

    def _erasure(self) -> str:
        """Control sequences that erase the rows of the live line and leave the cursor at their beginning."""
        rows = -(-len(self._shown) // _columns())
        return "\r" + "\x1b[A" * (rows - 1) + "\x1b[J"


def _columns() -> int:
    """Current width of the terminal. An exported COLUMNS is ignored, because it does not change when the terminal is
    resized."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns


def has_live_line() -> bool:
    """True if standard output is a terminal whose last line can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class LogFile:
    """Appends lines to log.txt. Each line is a single write, so that two ranks can write the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def write(self, line: str) -> None:
        self._file = self._file or open(self._path, "ab", buffering=0)
        self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLines:
    """Appends records to metrics.jsonl. Records that could not be written are written with the next record."""

    name = "metrics.jsonl"
    rest_seconds = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=_MAX_PENDING)
        self._end: int | None = None

    def log(self, entry: LogEntry) -> None:
        if entry.record is not None:
            self._pending.append(encode(entry.record))
            self._flush()

    def close(self) -> None:
        if self._pending:
            self._flush()

    def _flush(self) -> None:
        """Writes all pending records to the end of the file, overwriting the partial output of failed attempts."""
        payload = b"".join(self._pending)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if self._end is None:
                self._end = os.lseek(descriptor, 0, os.SEEK_END)
            written = 0
            while written < len(payload):
                written += os.pwrite(descriptor, payload[written:], self._end + written)
            os.truncate(descriptor, self._end + written)
        finally:
            os.close(descriptor)
        self._end += written
        self._pending.clear()


class TensorBoard:
    """Writes scalars to TensorBoard, plotted over iterations. Most scalars are also plotted over consumed samples. The
    number of tokens of each expert of a layer is a histogram over expert ids.

    After a failure, the next attempt opens a new event file, because the writer's thread ends at its first error.
    """

    name = "TensorBoard"
    rest_seconds = 60.0

    def __init__(self, directory: Path, resumed_iteration: int) -> None:
        self._directory = directory
        self._purge_step: int | None = resumed_iteration + 1
        """First iteration from which TensorBoard hides the points of earlier processes. None means that no points are
        hidden."""
        self._writer: Any = None

    def log(self, entry: LogEntry) -> None:
        try:
            self._writer = self._writer or self._start()
            for tag, value in entry.tags.items():
                self._writer.add_scalar(tag, value, entry.iteration)
                if has_samples_variant(tag):
                    self._writer.add_scalar(f"{tag} vs samples", value, entry.samples)
            for tag, values in (entry.record or {}).items():
                if isinstance(values, list):
                    self._add_bars(tag, values, entry.iteration)
        except OSError:
            self._writer, self._purge_step = None, None
            raise

    def _add_bars(self, tag: str, values: list[float], iteration: int) -> None:
        """Adds a histogram with one bar per value."""
        bars = range(len(values))
        self._writer.add_histogram_raw(
            tag,
            min=0,
            max=len(values) - 1,
            num=sum(values),
            sum=sum(bar * value for bar, value in zip(bars, values, strict=True)),
            sum_squares=sum(bar**2 * value for bar, value in zip(bars, values, strict=True)),
            bucket_limits=[bar + 0.5 for bar in bars],
            bucket_counts=values,
            global_step=iteration,
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _start(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        _hide_tracebacks_of_writers()
        return SummaryWriter(str(self._directory), purge_step=self._purge_step, flush_secs=30)


def _hide_tracebacks_of_writers() -> None:
    """Hides tracebacks of TensorBoard's writer thread. The next `add_scalar` raises the thread's error again."""
    print_traceback = threading.excepthook
    if getattr(print_traceback, "hides_writers", False):
        return

    def print_other_tracebacks(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            print_traceback(failure)

    print_other_tracebacks.hides_writers = True  # type: ignore[attr-defined]
    threading.excepthook = print_other_tracebacks


class WandB:
    """Logs to Weights & Biases. W&B's environment variables apply: WANDB_MODE, ...; WANDB_RUN_ID resumes a run."""

    name = "Weights & Biases"
    rest_seconds = 600.0

    def __init__(self, settings: LoggingConfig, config: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = config
        self._run: Any = None

    def log(self, entry: LogEntry) -> None:
        self._run = self._run or self._start()
        self._run.log({**entry.tags, "samples vs steps": entry.samples}, step=entry.iteration)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        settings = self._settings
        folder = settings.wandb_save_dir or settings.run_dir or Path()
        folder.mkdir(parents=True, exist_ok=True)
        resumes = "WANDB_RUN_ID" in os.environ and "WANDB_RESUME" not in os.environ
        return wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_exp_name,
            entity=settings.wandb_entity or None,
            dir=str(folder),
            config=dict(self._config),
            resume="allow" if resumes else None,
        )
