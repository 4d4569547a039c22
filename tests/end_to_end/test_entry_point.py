"""`pretrain_moe.py` in this process: shutdown, signals, deterministic mode, sample counts, early rejections."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import arguments.read
import pretrain_moe
from megatron_moe.build import build_context
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem, ExitCode
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.data.loader import SampleOrder, TrainLoader
from megatron_moe.logs.reporter import Reporter
from megatron_moe.resilience import signals
from pretrain_moe import main, pretrain
from tests.helpers import tiny


def plan_of(tmp_path: Path) -> RunPlan:
    """Plan of one iteration and one evaluation."""
    plan = tiny.plan()
    return replace(
        plan,
        loop=replace(plan.loop, train_iters=1, eval_iters=1),
        logging=replace(plan.logging, run_dir=tmp_path / "run", plots=False, progress_bar=False),
    )


def test_the_train_loader_is_closed_at_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[TrainLoader] = []
    monkeypatch.setattr(TrainLoader, "close", lambda loader: closed.append(loader))
    with ExitStack() as cleanup:
        pretrain(plan_of(tmp_path), cleanup)
        assert not closed
    assert len(closed) == 1


def test_a_second_signal_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(plan: RunPlan, cleanup: ExitStack) -> None:
        signal = KeyboardInterrupt("SIGTERM, the second signal")
        signal.add_note("nothing is lost")
        raise signal

    monkeypatch.setattr(arguments.read, "read_plan", lambda argv, environ, vocab_size_of: tiny.plan())
    monkeypatch.setattr(pretrain_moe, "pretrain", interrupted)
    assert main([], {}) == 130
    assert capsys.readouterr().err == "rank 0: interrupted: SIGTERM, the second signal; nothing is lost\n"


def test_a_second_signal_while_the_run_ends_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first signal arrives before a step, the second during shutdown."""
    plan = plan_of(tmp_path)
    plan = replace(plan, resilience=replace(plan.resilience, exit_signals=("SIGUSR1",)))
    next_step, close = TrainLoader.next_step, Reporter.close
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)
    monkeypatch.setattr(arguments.read, "read_plan", lambda argv, environ, vocab_size_of: plan)
    for owner, name, method in ((TrainLoader, "next_step", next_step), (Reporter, "close", close)):
        monkeypatch.setattr(owner, name, signalled(method))
    assert main([], {}) == ExitCode.PREEMPTED_UNSAVED
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["code"]) == ("preempted", ExitCode.PREEMPTED_UNSAVED)


def signalled(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a method to send SIGUSR1 to this process before each call."""

    def call(self: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return method(self)

    return call


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_mode_is_set_in_torch(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    plan = tiny.plan(precision=replace(tiny.plan().precision, deterministic_mode=deterministic))
    try:
        build_context(plan).stop()
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_skipped_iteration_consumes_its_samples_without_training(tmp_path: Path) -> None:
    """The learning rate decays linearly over 800 samples, 8 per step."""
    plan = plan_of(tmp_path)
    loop = replace(plan.loop, train_iters=3, iterations_to_skip=(2,))
    with ExitStack() as cleanup:
        pretrain(replace(plan, loop=loop), cleanup)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "iteration 2: skipped its" in log
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "lm loss" in row and "learning-rate" in row]
    assert [(row["iteration"], row["samples"]) for row in steps] == [(1, 8), (3, 24)]
    assert [row["applied-learning-rate"] for row in steps] == pytest.approx([1e-2, 1e-2 * (1 - 8 / 800)])
    assert [row["learning-rate"] for row in steps] == pytest.approx([1e-2 * (1 - n / 800) for n in (8, 16)])
    assert [f"learning rate: {row['learning-rate']:.6E} |" in log for row in steps] == [True, True]


class Start(NamedTuple):
    """One launch of a run whose length is given in samples."""

    batch: BatchConfig
    exit_interval: int | None = None


@pytest.mark.parametrize(
    ("samples", "starts", "consumed", "note"),
    [
        (
            40,
            (
                Start(BatchConfig(micro_batch_size=2, global_batch_size=4), 6),
                Start(BatchConfig(micro_batch_size=2, global_batch_size=8)),
            ),
            [4, 8, 12, 16, 20, 24, 32, 40],
            "ends at iteration 8, with the last full batch of 40 samples; Megatron-LM would end at iteration 5,",
        ),
        (
            40,
            (
                Start(BatchConfig(micro_batch_size=2, global_batch_size=8), 3),
                Start(BatchConfig(micro_batch_size=2, global_batch_size=4)),
            ),
            [8, 16, 24, 28, 32, 36, 40],
            "ends at iteration 7, with the last full batch of 40 samples; Megatron-LM would end at iteration 10,",
        ),
        (21, (Start(BatchConfig(micro_batch_size=2, global_batch_size=4)),), [4, 8, 12, 16, 20], ""),
        (
            70,
            (Start(BatchConfig(micro_batch_size=2, global_batch_size=12, rampup_batch_size=(4, 2, 100))),),
            [4, 8, 12, 16, 20, 24, 28, 34, 40, 46, 52, 60, 68],
            "ends at iteration 13, with the last full batch of 70 samples; Megatron-LM would end at iteration 14,",
        ),
        (
            70,
            (
                Start(BatchConfig(micro_batch_size=2, global_batch_size=16), 2),
                Start(BatchConfig(micro_batch_size=2, global_batch_size=16, rampup_batch_size=(4, 4, 60))),
            ),
            [16, 32, 40, 52, 64],
            "ends at iteration 5, with the last full batch of 70 samples; Megatron-LM would end at iteration 10,",
        ),
    ],
)
def test_train_samples_end_with_the_last_whole_batch(
    tmp_path: Path, samples: int, starts: tuple[Start, ...], consumed: list[int], note: str
) -> None:
    plan = plan_of(tmp_path)
    for batch, exit_interval in starts:
        iterations = batch.steps_for(samples)
        loop = replace(
            plan.loop, train_iters=iterations, train_samples=samples, eval_iters=0, exit_interval=exit_interval
        )
        start = replace(
            plan,
            loop=loop,
            batch=batch,
            checkpoint=CheckpointConfig(save=tmp_path / "checkpoints"),
            logging=replace(plan.logging, log_interval=1),
        )
        with ExitStack() as cleanup:
            pretrain(start, cleanup)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["samples"]) for row in rows] == list(enumerate(consumed, 1))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f" iteration {len(consumed):8d}/{len(consumed):8d} |" in log
    assert note in log if note else "Megatron-LM would" not in log


def test_too_little_space_for_a_checkpoint_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "free_bytes", lambda storage, path: 1000)
    plan = replace(plan_of(tmp_path), checkpoint=CheckpointConfig(save=tmp_path / "checkpoints"))
    with ExitStack() as cleanup, pytest.raises(EnvironmentProblem, match="a checkpoint of this run takes"):
        pretrain(plan, cleanup)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with ExitStack() as cleanup:
        pretrain(replace(plan, loop=replace(plan.loop, skip_train=True)), cleanup)


def test_a_run_longer_than_its_data_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    plan = replace(plan, loop=replace(plan.loop, train_iters=5), logging=replace(plan.logging, log_interval=1))
    monkeypatch.setattr(SampleOrder, "end", 20)
    with ExitStack() as cleanup, pytest.raises(DataProblem, match="enough for 2 iterations, but 5 are left"):
        pretrain(plan, cleanup)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
