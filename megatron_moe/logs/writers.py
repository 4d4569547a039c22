"""Where text and scalars go: log.txt, metrics.jsonl, TensorBoard, Weights & Biases.

A sink may fail at any time: a full disk, a lost network. `Guard` is the one place where an exception is caught without
knowing it, because telemetry must not stop training.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.metrics_file import Record, encode
from megatron_moe.logs.tags import has_samples_variant

HOUR = 3600.0
_MAX_PENDING = 10_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Scalars of one moment."""

    iteration: int
    samples: int
    tags: Mapping[str, float]
    """What dashboards show."""
    record: Record | None = None
    """What metrics.jsonl keeps; None: nothing."""


class Sink(Protocol):
    """Takes scalars."""

    name: str
    rest_seconds: float
    """How long to leave it alone after a failure: 0 where another attempt costs nothing."""

    def log(self, entry: Entry) -> None: ...
    def close(self) -> None: ...


class Guard:
    """Runs telemetry so that its failure never stops or slows training; each sink's failure is told once per hour."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._told_at: dict[str, float] = {}
        self._resting_until: dict[str, float] = {}

    def run(self, name: str, action: Callable[[], object], rest_seconds: float = 0.0) -> None:
        """Runs `action` unless `name` rests after a failure."""
        now = self._clock()
        if now < self._resting_until.get(name, now):
            return
        try:
            action()
        except Exception as error:
            self._resting_until[name] = now + rest_seconds
            if now - self._told_at.get(name, -HOUR) >= HOUR:
                self._told_at[name] = now
                self._tell(f"telemetry: {name} failed ({type(error).__name__}: {error}); training goes on without it")


class LogFile:
    """Appends lines to log.txt, each in one write, so that two ranks may share the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def write(self, line: str) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JsonLines:
    """metrics.jsonl. Records that could not be written wait and go out with the next one."""

    name = "metrics.jsonl"
    rest_seconds = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=_MAX_PENDING)
        self._end: int | None = None

    def log(self, entry: Entry) -> None:
        if entry.record is not None:
            self._pending.append(encode(entry.record))
            self._flush()

    def close(self) -> None:
        if self._pending:
            self._flush()

    def _flush(self) -> None:
        """Writes at the end of the last whole record: what a failed attempt left there is overwritten."""
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
    """Scalars by iteration, and most of them again by consumed samples. After a failure the next attempt begins another
    file, because the thread of a writer ends with its first error."""

    name = "TensorBoard"
    rest_seconds = 60.0

    def __init__(self, directory: Path, resumed_iteration: int) -> None:
        self._directory = directory
        self._purge_step: int | None = resumed_iteration + 1
        """Curves of a resumed run replace what the interrupted one wrote from here on."""
        self._writer: Any = None

    def log(self, entry: Entry) -> None:
        try:
            if self._writer is None:
                self._writer = self._start()
            for tag, value in entry.tags.items():
                self._writer.add_scalar(tag, value, entry.iteration)
                if has_samples_variant(tag):
                    self._writer.add_scalar(f"{tag} vs samples", value, entry.samples)
        except OSError:
            self._writer, self._purge_step = None, None
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _start(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        _hide_tracebacks_of_writers()
        return SummaryWriter(str(self._directory), purge_step=self._purge_step, flush_secs=30)


def _hide_tracebacks_of_writers() -> None:
    """The thread of a TensorBoard writer raises what it also passes on to the next `add_scalar`, where `Guard` reports
    it in one sentence."""
    print_traceback = threading.excepthook
    if getattr(print_traceback, "hides_writers", False):
        return

    def hook(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            print_traceback(failure)

    hook.hides_writers = True  # type: ignore[attr-defined]
    threading.excepthook = hook


class WandB:
    """Weights & Biases. Its own variables (WANDB_MODE, WANDB_RUN_ID, WANDB_RESUME …) hold; a given run id resumes."""

    name = "Weights & Biases"
    rest_seconds = 600.0

    def __init__(self, settings: LoggingConfig, config: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = config
        self._run: Any = None

    def log(self, entry: Entry) -> None:
        if self._run is None:
            self._run = self._start()
        self._run.log({**entry.tags, "samples vs steps": entry.samples}, step=entry.iteration)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        folder = self._settings.wandb_save_dir or self._settings.run_dir or Path()
        folder.mkdir(parents=True, exist_ok=True)
        continues = "WANDB_RUN_ID" in os.environ and "WANDB_RESUME" not in os.environ
        return wandb.init(
            project=self._settings.wandb_project,
            name=self._settings.wandb_exp_name,
            entity=self._settings.wandb_entity or None,
            dir=str(folder),
            config=dict(self._config),
            resume="allow" if continues else None,
        )
