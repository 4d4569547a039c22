"""The hang watchdog ends a run that exceeds a time limit, with stacks, a status and the waiting collective."""

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
import torch

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience import watchdog
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.resilience.watchdog import Watchdog, waiting_in
from tests.helpers.ranks import REPOSITORY, on_threads

PATIENCE = 120.0


@pytest.fixture(autouse=True)
def no_c_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays the C timer, which would end the test process on a machine that stalls for seconds."""
    monkeypatch.setattr(watchdog, "_C_TIMER_DELAY_S", 3600.0)


def test_timeout_writes_stacks_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expired, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        expired.set()

    with Watchdog({"step": 0.2}, tmp_path, status=RunStatus(tmp_path), exit_process=leave) as dog:
        dog.enter("step", 7)
        assert expired.wait(PATIENCE)
    assert codes == [ExitCode.HANG]
    stacks = (tmp_path / "crash" / "stacks_00000.txt").read_text()
    assert "in test_timeout_writes_stacks_and_status" in stacks and "in _watch" in stacks
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["code"]) == ("failed", 10)
    assert re.match(r"rank 0 made no progress for \d+ s: phase step, iteration 7\b", found["sentence"]), found
    assert "--step-deadline" in capsys.readouterr().err


def test_problem_with_another_rank_ends_the_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, codes, found = threading.Event(), [], []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watchdog({"step": PATIENCE}, tmp_path, status=RunStatus(tmp_path), exit_process=leave) as dog:
        dog.monitor(lambda: found[0] if found else None)
        dog.enter("step", 7)
        assert not ended.wait(3 * watchdog._POLL_S)
        found.append(OtherRankProblem("rank 1 is late", 1))
        assert ended.wait(PATIENCE)
    assert codes == [ExitCode.OTHER_RANK]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["code"], status["rank"]) == ("failed", ExitCode.OTHER_RANK, 1)
    assert status["sentence"] == "iteration 7: rank 1 is late"
    assert "rank 0: iteration 7: rank 1 is late" in capsys.readouterr().err


def test_ranks_without_stacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file server's clock is two hours behind this host's."""
    expired, there = threading.Event(), time.time()
    crash = tmp_path / "crash"
    crash.mkdir()
    for rank, seconds in ((1, 600.0), (2, -600.0)):
        (crash / f"stacks_{rank:05d}.txt").write_text("")
        os.utime(crash / f"stacks_{rank:05d}.txt", (0.0, there + seconds))
    monkeypatch.setattr(time, "time", lambda: there + 7200)
    with Watchdog({"step": 0.2}, tmp_path, world_size=4, exit_process=lambda code: expired.set()) as dog:
        dog.enter("step", 7)
        assert expired.wait(PATIENCE)
    assert "; rank 2, rank 3 wrote no stacks: stopped" in capsys.readouterr().err


def test_timeout_with_closed_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expired = threading.Event()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        status = RunStatus(tmp_path)
        with Watchdog({"step": 0.2}, tmp_path, status=status, exit_process=lambda code: expired.set()) as dog:
            dog.enter("step", 7)
            assert expired.wait(PATIENCE)
        with suppress(BrokenPipeError):
            broken.close()
    assert json.loads((tmp_path / "status.json").read_text())["code"] == 10


def test_no_timeout_for_phases_that_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, expired = [0.0], threading.Event()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    with Watchdog({"step": 1.5}, tmp_path, exit_process=lambda code: expired.set()) as dog:
        for iteration in range(3):
            dog.enter("step", iteration)
            assert not expired.wait(0.05)
            now[0] += 1.4
        dog.enter("evaluation")  # has no deadline
        now[0] += 1000.0
        assert not expired.wait(2.0)
    assert list(tmp_path.iterdir()) == []


def test_thread_ends_with_the_context() -> None:
    with Watchdog({"step": 60.0}, None):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_no_thread_without_timeouts() -> None:
    with Watchdog({}, None) as dog:
        dog.enter("step", 1)
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_waiting_rank_names_the_collective_and_its_group() -> None:
    threads: dict[int, int] = {}

    def main(context: ParallelContext) -> str:
        threads[context.rank] = threading.get_ident()
        reported = ""
        while context.rank == 1 and "all_reduce" not in reported:  # until the other rank waits
            frame = sys._current_frames().get(threads.get(0, 0))
            reported = waiting_in(frame) if frame else ""
        all_reduce_(torch.zeros(1), context.group("dp"))
        return reported

    _, reported = on_threads(ParallelConfig(world_size=2), main)
    assert reported == ", waiting in all_reduce over dp (ranks 0, 1)"


def test_c_timer_prints_stacks_while_the_interpreter_is_locked() -> None:
    """The main thread runs C code that holds the interpreter lock."""
    code = """
import ctypes, sys
from megatron_moe.resilience import watchdog
watchdog._C_TIMER_DELAY_S, sleep = 0.5, ctypes.PyDLL(None).sleep
sys.setswitchinterval(1000.0)  # the other thread cannot run between the two lines, however late they execute
with watchdog.Watchdog({"step": 0.5}, None) as dog:
    dog.enter("step", 1)
    sleep(600)
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 1 and "Timeout" in process.stderr and "line 8 in <module>" in process.stderr
