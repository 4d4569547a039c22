"""Destinations of logs; a failure of one does not affect training or the others."""

import errno
import fcntl
import io
import json
import os
import re
import resource
import signal
import struct
import sys
import termios
import time
from contextlib import suppress

import pytest
from tensorboard.compat.tensorflow_stub.io import gfile

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.logs.metrics_file import read_metrics
from megatron_moe.logs.writers import (
    HOUR,
    Console,
    Guard,
    JsonLines,
    LiveConsole,
    LogEntry,
    LogFile,
    TensorBoard,
    WandB,
    has_live_line,
)
from tests.logs.reports import Clock, step_result


def entry(iteration: int, **tags: float) -> LogEntry:
    return LogEntry(iteration=iteration, samples=8 * iteration, tags=tags, record={"iteration": iteration, **tags})


def read_scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def fail() -> None:
    raise OSError("no space left")


def test_failures_are_reported_once_per_hour_and_sink():
    reported, clock = [], Clock()
    guard = Guard(reported.append, clock)
    for _ in range(3):
        guard.run("W&B", fail)
        guard.run("log.txt", fail)
    assert reported == [
        "telemetry: W&B failed (OSError: no space left); training continues without it",
        "telemetry: log.txt failed (OSError: no space left); training continues without it",
    ]
    clock.now += HOUR - 1
    guard.run("W&B", fail)
    assert len(reported) == 2
    clock.now += 1
    guard.run("W&B", fail)
    assert len(reported) == 3


def test_expensive_sink_pauses_after_a_failure():
    attempts, clock = [], Clock()
    guard = Guard(lambda text: None, clock)

    def attempt() -> None:
        attempts.append(clock.now)
        fail()

    for clock.now in (0.0, 5.0, 59.0, 60.0):
        guard.run("TensorBoard", attempt, rest_seconds=60.0)
    assert attempts == [0.0, 60.0]


def test_keyboard_interrupt_propagates():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard(print).run("console", interrupt)


def test_records_are_written_immediately_and_appended(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.log(entry(1, loss=2.0))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 1, "loss": 2}
    sink.log(LogEntry(iteration=2, samples=0, tags={"loss": 1.0}))
    JsonLines(tmp_path / "metrics.jsonl").log(entry(3, loss=1.0))  # a resumed run
    assert [record["iteration"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_failed_records_are_retried_without_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.log(entry(1, loss=1.5))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # The disk becomes full within the second record.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        for iteration in (2, 3):
            with pytest.raises(OSError):
                sink.log(entry(iteration, loss=2.5))
        assert [record["iteration"] for record in read_metrics(path)] == [1], "the torn record is skipped"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    sink.close()
    assert [record["iteration"] for record in read_metrics(path)] == [1, 2, 3]


def test_log_file_is_appended_by_several_ranks(tmp_path):
    (tmp_path / "log.txt").write_text("before\n")
    first, second = LogFile(tmp_path / "log.txt"), LogFile(tmp_path / "log.txt")
    first.write("one")
    second.write("two")
    first.write("three")
    first.close()
    second.close()
    assert (tmp_path / "log.txt").read_text() == "before\none\ntwo\nthree\n"


def test_tensorboard_recovers_from_a_full_disk(tmp_path, monkeypatch, capfd):
    """The writer thread prints no traceback, and a new writer continues the curves."""
    reported, clock = [], [0.0]
    guard, sink = Guard(reported.append, clock=lambda: clock[0]), TensorBoard(tmp_path, resumed_iteration=0)

    def full(system, filename, content, binary_mode=False):
        raise OSError(errno.ENOSPC, "No space left on device")

    def log(iteration):
        guard.run("TensorBoard", lambda: sink.log(entry(iteration, mfu=1.0)), rest_seconds=sink.rest_seconds)

    log(1)
    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", full)
        patch.setattr(gfile.LocalFileSystem, "write", full)
        until = time.monotonic() + 60
        while not reported and time.monotonic() < until:
            log(2)
            time.sleep(0.01)
    assert len(reported) == 1 and "No space left on device" in reported[0]
    clock[0] += 61
    log(3)
    sink.close()
    assert "Traceback" not in capfd.readouterr().err
    assert len(list(tmp_path.glob("events.*"))) == 2


def test_tensorboard_scalars_over_iterations_and_samples(tmp_path):
    sink = TensorBoard(tmp_path, resumed_iteration=0)
    sink.log(entry(1, **{"lm loss": 2.0, "moe/max_violation": 0.5}))
    sink.log(entry(2, **{"lm loss": 1.5, "moe/max_violation": 0.25}))
    sink.close()
    assert read_scalars(tmp_path) == {
        "lm loss": [(1, 2.0), (2, 1.5)],
        "lm loss vs samples": [(8, 2.0), (16, 1.5)],
        "moe/max_violation": [(1, 0.5), (2, 0.25)],
    }


def test_tensorboard_shows_the_tokens_of_each_expert(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink, tag = TensorBoard(tmp_path, resumed_iteration=0), "moe/tokens_per_expert_layer_3"
    sink.log(LogEntry(iteration=5, samples=1, tags={}, record={"iteration": 5, tag: [10.0, 0.0, 30.0]}))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Histograms(tag)
    shown = event.histogram_value
    assert (event.step, shown.num, shown.min, shown.max) == (5, 40, 0, 2)
    bars = dict(zip(shown.bucket_limit, shown.bucket, strict=True))
    assert [bars.get(expert + 0.5, 0) for expert in range(3)] == [10, 0, 30]


def test_tensorboard_of_a_resumed_run_replaces_later_points(tmp_path):
    first = TensorBoard(tmp_path, resumed_iteration=0)
    for iteration in (1, 2, 3):
        first.log(entry(iteration, mfu=float(iteration)))
    first.close()
    time.sleep(1.0)  # event files are read in the order of their names, which start with the second they were opened in
    second = TensorBoard(tmp_path, resumed_iteration=1)
    second.log(entry(2, mfu=20.0))
    second.close()
    assert read_scalars(tmp_path) == {"mfu": [(1, 1.0), (2, 20.0)]}


def test_wandb_offline_with_a_given_run_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "300")  # its service process may start slowly
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    config = LoggingConfig(wandb_project="moe", wandb_exp_name="first", wandb_save_dir=tmp_path / "there")
    sink = WandB(config, {"lr": 0.1})
    sink.log(entry(1, **{"lm loss": 2.0}))
    assert sink._run.id == "abc123"
    assert (sink._run.name, sink._run.project, sink._run.config["lr"]) == ("first", "moe", 0.1)
    assert sink._run.settings.resume == "allow"
    sink.close()
    (stored,) = (tmp_path / "there" / "wandb").glob("offline-run-*-abc123/*.wandb")
    # a separate process writes the file, possibly after `finish` has returned
    deadline = time.monotonic() + 300
    while b"samples vs steps" not in stored.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"lm loss" in stored.read_bytes() and b"samples vs steps" in stored.read_bytes()


class Terminal(io.StringIO):
    """Terminal with 100 columns."""

    def isatty(self) -> bool:
        return True


def sit_at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replaces stdout within the test, because pytest replaces it for each phase."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return screen


def test_plain_console(capsys):
    assert not has_live_line()
    console = Console()
    console.start(0, 10)
    console.write(" iteration 1 | [not markup] |")
    console.progress(step_result(1))
    console.close()
    assert capsys.readouterr().out == " iteration 1 | [not markup] |\n"


@pytest.mark.parametrize(("kind", "redrawn"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_live_line_requires_a_capable_terminal(kind, redrawn, monkeypatch):
    sit_at_terminal(monkeypatch)
    monkeypatch.setenv("TERM", kind)
    assert has_live_line() is redrawn


def test_live_console(monkeypatch):
    terminal = sit_at_terminal(monkeypatch)
    console = LiveConsole()
    console.write("before the start")
    console.start(2, 10)
    line = " [2026] iteration 3 | [bold]not markup | " + "x" * 200
    console.write(line)
    for iteration, seconds in ((3, 60.0), (4, 0.5), (5, 0.5)):  # the first step compiles
        console.progress(step_result(iteration, loss=2.5, num_tokens=8 * 32, seconds=seconds))
    console.close()
    shown = terminal.getvalue()
    assert shown.startswith("before the start\n")
    assert line in shown
    last = shown[shown.rindex("iteration") :]
    assert all(part in last for part in ("5/10", "loss 2.5000", "512 tokens/s", "0:00:02 left")), last


class Screen:
    """Pseudo-terminal of a width that changes, whose emulator wraps long lines again at the new width."""

    def __init__(self) -> None:
        self._reading, self._writing = os.openpty()
        os.set_blocking(self._reading, False)
        self.stdout = open(self._writing, "w")
        self.width, self.lines = 100, [""]
        self.resize(100)

    def resize(self, width: int) -> None:
        self.width = width
        fcntl.ioctl(self._writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    def show(self) -> None:
        """Applies what was written since the last call."""
        with suppress(BlockingIOError):
            while text := os.read(self._reading, 65536).decode():
                self._apply(text)

    def close(self) -> None:
        self.stdout.close()
        os.close(self._reading)

    def _apply(self, text: str) -> None:
        for token in re.findall(r"\r(?:\x1b\[A)*\x1b\[J|\n|[^\r\n\x1b]+", text):
            if token.startswith("\r"):
                rows = [
                    line[at : at + self.width] for line in self.lines for at in range(0, len(line) or 1, self.width)
                ]
                self.lines = [*rows[: len(rows) - 1 - token.count("[A")], ""]
            elif token == "\n":
                self.lines.append("")
            else:
                self.lines[-1] += token


@pytest.mark.parametrize("widths", [(100, 30, 100), (100, 12, 200, 31)])
def test_a_terminal_that_changes_its_width_keeps_no_fragments(monkeypatch, widths):
    screen, clock = Screen(), Clock()
    monkeypatch.setattr("sys.stdout", screen.stdout)
    monkeypatch.setenv("COLUMNS", "100")  # a shell exports the width of its start
    console = LiveConsole(clock=clock)
    console.start(0, 10)
    for iteration, width in enumerate(widths, start=1):
        screen.show()
        screen.resize(width)
        clock.now += 1.0
        console.progress(step_result(iteration, seconds=0.5))
        console.write(f"note {iteration}")
    console.close()
    screen.show()
    screen.close()
    notes = [f"note {iteration}" for iteration in range(1, len(widths) + 1)]
    assert screen.lines[:-2] == notes and screen.lines[-1] == ""
    assert screen.lines[-2].startswith(f"iteration {len(widths)}/10 ["[: widths[-1] - 1])


def test_closing_the_live_console_is_idempotent(monkeypatch):
    sit_at_terminal(monkeypatch)
    console = LiveConsole()
    console.close()
    console.start(0, 10)
    console.close()
    console.close()
