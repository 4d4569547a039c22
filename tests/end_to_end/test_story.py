"""The story of `pretrain_moe.py` in this process: what it opens it closes, what is asked for is switched on."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import arguments.read
import pretrain_moe
from megatron_moe.build import build_context
from megatron_moe.data.loader import TrainLoader
from megatron_moe.logs.reporter import Reporter
from megatron_moe.specs.exitcodes import ExitCode
from megatron_moe.specs.run import RunPlan
from megatron_moe.watch import signals
from pretrain_moe import main, pretrain
from tests import tiny


def plan_of(tmp_path: Path) -> RunPlan:
    """One iteration, evaluated once."""
    plan = tiny.plan()
    return replace(
        plan,
        loop=replace(plan.loop, train_iters=1, eval_iters=1),
        logging=replace(plan.logging, run_dir=tmp_path / "run", plots=False, progress_bar=False),
    )


def test_the_loader_of_the_training_data_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[TrainLoader] = []
    monkeypatch.setattr(TrainLoader, "close", lambda loader: closed.append(loader))
    with ExitStack() as goodbye:
        pretrain(plan_of(tmp_path), goodbye)
        assert not closed
    assert len(closed) == 1


def test_a_second_signal_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(plan: RunPlan, goodbye: ExitStack) -> None:
        raise KeyboardInterrupt("SIGTERM, the second signal")

    monkeypatch.setattr(arguments.read, "read_plan", lambda argv, environ, vocab_size_of: tiny.plan())
    monkeypatch.setattr(pretrain_moe, "pretrain", interrupted)
    assert main([], {}) == 130
    assert capsys.readouterr().err == "rank 0: left at once: SIGTERM, the second signal\n"


def test_a_second_signal_while_the_run_ends_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 29: the first comes before a step, the second while everything is closed."""
    plan = plan_of(tmp_path)
    plan = replace(plan, resilience=replace(plan.resilience, exit_signals=("SIGUSR1",)))
    next_step, close = TrainLoader.next_step, Reporter.close
    monkeypatch.setattr(signals, "_ONE_WISH_SECONDS", 0.0)
    monkeypatch.setattr(arguments.read, "read_plan", lambda argv, environ, vocab_size_of: plan)
    for owner, name, method in ((TrainLoader, "next_step", next_step), (Reporter, "close", close)):
        monkeypatch.setattr(owner, name, signalled(method))
    assert main([], {}) == ExitCode.PREEMPTED_UNSAVED
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["code"]) == ("preempted", ExitCode.PREEMPTED_UNSAVED)


def signalled(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The method, before which this process gets SIGUSR1."""

    def call(self: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return method(self)

    return call


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_mode_is_switched_on_in_torch(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    plan = tiny.plan(precision=replace(tiny.plan().precision, deterministic=wanted))
    try:
        build_context(plan).stop()
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert torch.backends.cudnn.benchmark is not wanted
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_iteration_to_skip_uses_up_its_samples_and_trains_nothing(tmp_path: Path) -> None:
    """The learning rate falls linearly over 800 samples, of which a step takes 8."""
    plan = plan_of(tmp_path)
    loop = replace(plan.loop, train_iters=3, iterations_to_skip=(2,))
    with ExitStack() as goodbye:
        pretrain(replace(plan, loop=loop), goodbye)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "iteration 2: its" in log and "passed over" in log
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "lm loss" in row and "learning-rate" in row]
    assert [(row["iteration"], row["samples"]) for row in steps] == [(1, 8), (3, 24)]
    assert [row["learning-rate"] for row in steps] == pytest.approx([1e-2, 1e-2 * (1 - 8 / 800)])
