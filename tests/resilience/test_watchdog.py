"""Deadlines: what a run leaves behind that waits too long, and that it ends."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.collectives import barrier
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience import watchdog
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.resilience.watchdog import Watchdog, waiting_in
from tests.helpers.ranks import REPOSITORY, on_threads

PATIENCE = 120.0


@pytest.fixture(autouse=True)
def no_timer_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine stands still for seconds, it could be quicker than the thread, and end all tests."""
    monkeypatch.setattr(watchdog, "_LOCKED_SECONDS", 3600.0)


def test_an_expired_deadline_leaves_stacks_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P7."""
    gone, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        gone.set()

    with Watchdog({"step": 0.2}, tmp_path, leave=leave) as hang_watchdog:
        hang_watchdog.reports_to(RunStatus(tmp_path))
        hang_watchdog.enter("step", 7)
        assert gone.wait(PATIENCE)
    assert codes == [ExitCode.HANG]
    stacks = (tmp_path / "crash" / "stacks_00000.txt").read_text()
    assert "in test_an_expired_deadline_leaves_stacks_and_a_status" in stacks and "in _watch" in stacks
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["code"]) == ("failed", 10)
    assert re.match(r"rank 0 made no progress for \d+ s: phase step, iteration 7\b", found["sentence"]), found
    assert "--step-deadline" in capsys.readouterr().err


def test_ranks_that_left_no_stacks_in_this_start_are_named_by_the_clock_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P7: the file server's clock is two hours behind this host's."""
    gone, there = threading.Event(), time.time()
    crash = tmp_path / "crash"
    crash.mkdir()
    for rank, seconds in ((1, 600.0), (2, -600.0)):
        (crash / f"stacks_{rank:05d}.txt").write_text("")
        os.utime(crash / f"stacks_{rank:05d}.txt", (0.0, there + seconds))
    monkeypatch.setattr(time, "time", lambda: there + 7200)
    with Watchdog({"step": 0.2}, tmp_path, world_size=4, leave=lambda code: gone.set()) as hang_watchdog:
        hang_watchdog.enter("step", 7)
        assert gone.wait(PATIENCE)
    assert "; no stacks came from rank 2, rank 3: stopped" in capsys.readouterr().err


def test_a_run_whose_stderr_nobody_reads_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7."""
    gone = threading.Event()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        with Watchdog({"step": 0.2}, tmp_path, leave=lambda code: gone.set()) as hang_watchdog:
            hang_watchdog.reports_to(RunStatus(tmp_path))
            hang_watchdog.enter("step", 7)
            assert gone.wait(PATIENCE)
        with suppress(BrokenPipeError):
            broken.close()
    assert json.loads((tmp_path / "status.json").read_text())["code"] == 10


def test_phases_that_end_in_time_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, gone = [0.0], threading.Event()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    with Watchdog({"step": 1.5}, tmp_path, leave=lambda code: gone.set()) as hang_watchdog:
        for iteration in range(3):
            hang_watchdog.enter("step", iteration)
            assert not gone.wait(0.05)
            now[0] += 1.4
        hang_watchdog.enter("evaluation")  # has no deadline
        now[0] += 1000.0
        assert not gone.wait(2.0)
    assert list(tmp_path.iterdir()) == []


def test_nothing_watches_any_more_behind_the_end() -> None:
    """A thread that frees tensors while the interpreter ends aborts the process."""
    with Watchdog({"step": 60.0}, None):
        assert any(thread.name == "deadlines" for thread in threading.enumerate())
    assert not any(thread.name == "deadlines" for thread in threading.enumerate())


def test_without_deadlines_nothing_is_watched() -> None:
    with Watchdog({}, None) as hang_watchdog:
        hang_watchdog.enter("step", 1)
        assert not any(thread.name == "deadlines" for thread in threading.enumerate())


def test_a_rank_that_waits_names_the_collective_and_its_group() -> None:
    """P7."""
    threads: dict[int, int] = {}

    def main(context: ParallelContext) -> str:
        threads[context.rank] = threading.get_ident()
        said = ""
        while context.rank == 1 and "all_reduce" not in said:  # until the other rank waits
            frame = sys._current_frames().get(threads.get(0, 0))
            said = waiting_in(frame) if frame else ""
        barrier(context.group("dp"))
        return said

    _, said = on_threads(ParallelConfig(world_size=2), main)
    assert said == ", waiting in all_reduce over dp (ranks 0, 1)"


def test_where_the_interpreter_is_locked_a_timer_in_c_prints_the_stacks() -> None:
    """Fault 30: C code that never gives the interpreter back."""
    code = """
import ctypes, sys
from megatron_moe.resilience import watchdog as hang
hang._LOCKED_SECONDS, sleep = 0.5, ctypes.PyDLL(None).sleep
sys.setswitchinterval(1000.0)  # the thread gets no chance between the two lines, however late they come
with hang.Deadlines({"step": 0.5}, None) as deadlines:
    deadlines.enter("step", 1)
    sleep(600)
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 1 and "Timeout" in process.stderr and "line 8 in <module>" in process.stderr
