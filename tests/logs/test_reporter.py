"""Contents and destinations of reports, and failures of telemetry."""

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from megatron_moe.build import build_reporter
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.flops import flops_per_step
from megatron_moe.logs.log_line import ValidationReport
from megatron_moe.logs.metrics_file import read_metrics
from megatron_moe.logs.reporter import Reporter, memory_line, memory_tags
from megatron_moe.logs.writers import LogEntry
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.ranks import REPOSITORY, on_threads
from tests.logs.reports import METRICS, step_result


class Listener:
    """Sink that records its entries."""

    name = "listener"
    rest_seconds = 0.0

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.closed = False

    def log(self, entry: LogEntry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        self.closed = True


class Broken(Listener):
    """Sink that always fails."""

    name = "broken"

    def log(self, entry: LogEntry) -> None:
        raise RuntimeError("quota exceeded")

    def close(self) -> None:
        raise RuntimeError("quota exceeded")


def plan(logging: LoggingConfig, **changes):
    return replace(tiny.plan(), logging=logging, **changes)


def run(reporter: Reporter, iterations: range, consumed_samples: int = 0) -> None:
    """Calls the reporter as the training loop does."""
    reporter.begin_run(iterations.start - 1, 100, samples=consumed_samples, tokens=0)
    for iteration in iterations:
        reporter.observe(step_result(iteration, loss=1.0 / iteration))
        if reporter.is_due(iteration):
            reporter.report_steps(METRICS)


@pytest.fixture
def context():
    return ParallelContext.single()


def test_contents_of_the_run_folder(tmp_path, context):
    folder = tmp_path / "runs" / "one"
    config = LoggingConfig(run_dir=folder, log_interval=2, log_style="short")
    reporter = build_reporter(plan(config, resolved_yaml="lr: 0.1\n", command_line="pretrain_moe.py --lr 0.1"), context)
    reporter.note("hello")
    run(reporter, range(1, 5))
    reporter.report_validation(ValidationReport(iteration=4, consumed_samples=32, loss=2.0))
    reporter.close()
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "command.txt",
        "environment.txt",
        "log.txt",
        "metrics.jsonl",
        "plots",
        "run.yaml",
        "tensorboard",
    ]
    assert sorted(path.name for path in (folder / "plots").iterdir()) == ["expert_load.png", "loss.png"]
    assert (folder / "run.yaml").read_text() == "lr: 0.1\n"
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [1, 2, 4, 4]
    assert records[2]["lm loss"] == (1 / 3 + 1 / 4) / 2
    assert records[2]["samples"] == 32
    assert records[3]["lm loss validation"] == 2
    lines = (folder / "log.txt").read_text().splitlines()
    assert lines[0] == "hello"
    assert lines[1].startswith("  1/100   1% |")
    assert lines[2].startswith("[Rank 0] (after 1 iterations) memory (MB) | ")
    assert lines[-1] == "4 on validation set: lm loss 2.0000 (ppl 7.39)"


def test_nothing_is_written_without_a_run_folder(tmp_path, context, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reporter = build_reporter(plan(LoggingConfig(log_interval=1)), context)
    run(reporter, range(1, 3))
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    assert "iteration        2/     100 | consumed samples:           16 |" in capsys.readouterr().out


def test_reports_are_due_every_interval_and_after_first_and_last_iteration(context):
    reporter = build_reporter(plan(LoggingConfig(log_interval=30)), context)
    assert [iteration for iteration in range(1, 101) if reporter.is_due(iteration)] == [1, 30, 60, 90, 100]


def test_dashboards_get_steps_and_records_get_averages(context):
    listener = Listener()
    reporter = build_reporter(plan(LoggingConfig(log_interval=2)), context, sinks=[listener])
    run(reporter, range(1, 5))
    reporter.close()
    steps = [each for each in listener.entries if each.record is None]
    assert [each.tags["lm loss"] for each in steps] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert [each.samples for each in steps] == [8, 16, 24, 32]
    (last,) = [each for each in listener.entries if each.record is not None and each.iteration == 4]
    assert last.record["lm loss"] == (1 / 3 + 1 / 4) / 2
    assert "lm loss" not in last.tags and last.tags["moe/max_violation"] == 0.3
    assert listener.closed


def test_tensorboard_interval(context):
    listener = Listener()
    reporter = build_reporter(
        plan(LoggingConfig(log_interval=3, tensorboard_log_interval=2)), context, sinks=[listener]
    )
    run(reporter, range(1, 5))
    assert [each.iteration for each in listener.entries if each.record is None] == [2, 4]
    (third,) = [each for each in listener.entries if each.iteration == 3]
    assert "lm loss" in third.tags, "no single step was drawn at iteration 3, so the average is"


def test_per_layer_tags(context):
    for wanted in (False, True):
        listener = Listener()
        reporter = build_reporter(
            plan(LoggingConfig(log_interval=1, moe_per_layer_logging=wanted)), context, sinks=[listener]
        )
        run(reporter, range(1, 2))
        report = listener.entries[-1]
        assert ("moe/max_violation_layer_1" in report.tags) == wanted
        assert "moe/tokens_per_expert_layer_1" not in report.tags
        assert report.record["moe/tokens_per_expert_layer_1"] == [2.0, 6.0]


def test_failing_sink_is_reported_once_and_does_not_stop_training(context, capsys):
    listener = Listener()
    reporter = build_reporter(plan(LoggingConfig(log_interval=1)), context, sinks=[Broken(), listener])
    run(reporter, range(1, 6))
    reporter.close()
    assert capsys.readouterr().err.count("telemetry: broken failed (RuntimeError: quota exceeded)") == 1
    assert listener.closed and [each.iteration for each in listener.entries if each.record] == [1, 2, 3, 4, 5]


def test_removed_run_folder_does_not_stop_training(tmp_path, context, capsys):
    folder = tmp_path / "run"
    reporter = build_reporter(plan(LoggingConfig(run_dir=folder, log_interval=1)), context)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file where the folder was")
    run(reporter, range(1, 4))
    reporter.close()
    err = capsys.readouterr().err
    assert all(f"telemetry: {name} failed" in err for name in ("metrics.jsonl", "TensorBoard", "log.txt"))


def test_closed_terminal_does_not_stop_training():
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from megatron_moe.logs.writers import Console\n"
        "from megatron_moe.logs.writers import Guard\n"
        "from functools import partial\n"
        "guard, console = Guard(lambda text: print(text, file=sys.stderr)), Console()\n"
        "sys.stdin.readline()\n"
        "for _ in range(3): guard.run('console', partial(console.write, 'line'))\n"
        "print('went on', file=sys.stderr)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    _, err = process.communicate("the reader has left\n", timeout=300)
    assert process.returncode == 0, err
    assert err.count("telemetry: console failed (BrokenPipeError") == 1
    assert "went on" in err


def test_run_folder_of_another_job_is_rejected_on_every_rank(tmp_path, context):
    config = LoggingConfig(run_dir=tmp_path, plots=False)
    first = build_reporter(plan(config, resolved_yaml="lr: 0.1\n", command_line="first"), context)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def second(context: ParallelContext) -> str:
        with pytest.raises(EnvironmentProblem) as caught:
            build_reporter(plan(config, resolved_yaml="lr: 0.2\n", command_line="second"), context)
        return str(caught.value)

    sentences = on_threads(ParallelConfig(world_size=3), second)
    assert re.fullmatch(
        rf"another job writes into the run folder {tmp_path}: process {os.getpid()} on \S+, started 20[^;]*; "
        "stop it or give another --run-dir folder",
        sentences[0],
    )
    assert sentences == [sentences[0]] * 3
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    first.close()
    build_reporter(plan(config), context).close()


class WithoutWandB(Reporter):
    """Reporter whose package check fails on rank 1."""

    def _refuse_missing_packages(self) -> None:
        if self.context.rank == 1:
            raise EnvironmentProblem("wandb is not installed")


def test_missing_package_on_one_rank_is_raised_on_every_rank(tmp_path):
    """All ranks raise, instead of waiting for one that has ended."""

    def main(context: ParallelContext) -> str:
        with pytest.raises(EnvironmentProblem) as caught:
            WithoutWandB(
                LoggingConfig(run_dir=tmp_path),
                context,
                model=tiny.model(),
                params_dtype="fp64",
                seq_length=tiny.SEQ,
                train_iters=1,
            )
        return str(caught.value)

    assert on_threads(ParallelConfig(world_size=3), main) == ["on rank 1: wandb is not installed"] * 3


def test_file_system_without_locks_is_reported(tmp_path, context, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks")))
    reporter = build_reporter(plan(LoggingConfig(run_dir=tmp_path, plots=False)), context)
    reporter.begin_run(0, 100, samples=0, tokens=0)
    reporter.close()
    assert capsys.readouterr().out.count("without locks: a second job would not be noticed") == 1


def test_wandb_without_its_package_is_rejected(context, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="not installed; run: pip install wandb"):
        build_reporter(plan(LoggingConfig(wandb_project="moe", wandb_exp_name="one")), context)


def test_resumed_run_drops_later_records_and_appends_its_command(tmp_path, context):
    config = LoggingConfig(run_dir=tmp_path, log_interval=1, plots=False)
    first = build_reporter(plan(config, command_line="first"), context)
    run(first, range(1, 6))
    first.close()
    second = build_reporter(plan(config, command_line="second"), context)
    run(second, range(4, 7), consumed_samples=24)
    second.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["samples"] for record in records] == [8, 16, 24, 32, 40, 48]
    commands = (tmp_path / "command.txt").read_text().splitlines()
    assert [line for line in commands if not line.startswith("#")] == ["first", "second"]


def test_throughput_counts_the_flops_of_model_and_batch(context):
    config = plan(LoggingConfig())
    listener = Listener()
    reporter = build_reporter(config, context, sinks=[listener])
    for num_samples in (8, 4):
        reporter.observe(step_result(1, num_samples=num_samples, num_tokens=num_samples * tiny.SEQ))
    reporter.report_steps({})
    assert listener.entries[-1].record["throughput"] == flops_per_step(config.model, 6, tiny.SEQ) / 0.5e12


def test_first_rank_writes_notes_and_last_rank_reports(tmp_path):
    config = plan(LoggingConfig(run_dir=tmp_path, log_interval=1, timing_log_level=1, plots=False))

    def rank(context: ParallelContext) -> int:
        listener = Listener()
        reporter = build_reporter(config, context, sinks=[listener] if context.is_last else [])
        reporter.note("from the first")
        reporter.begin_run(0, 100, samples=0, tokens=0)
        with reporter.timers.span("forward-backward", level=1):
            pass
        reporter.observe(step_result(1))
        reporter.report_steps(METRICS)
        reporter.close()
        return len(listener.entries)

    assert on_threads(ParallelConfig(world_size=3), rank) == [0, 0, 2]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines.count("from the first") == 1
    assert sum("iteration        1/     100" in line for line in lines) == 1
    assert sum(line.startswith("[Rank 0] (after 1 iterations) memory") for line in lines) == 1
    assert lines.count("(min, max) time across ranks (ms):") == 1
    assert any(line.startswith("    forward-backward ....") for line in lines)


def test_telemetry_threads_do_not_keep_the_process_alive(tmp_path):
    program = (
        "from megatron_moe.logs.writers import LogEntry, TensorBoard\n"
        "from pathlib import Path\n"
        "TensorBoard(Path('tb'), 0).log(LogEntry(iteration=1, samples=1, tags={'lm loss': 1.0}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0


def test_memory_interval(tmp_path):
    config = plan(LoggingConfig(run_dir=tmp_path, log_memory_interval=2, log_device_memory_used=True, plots=False))

    def rank(context: ParallelContext) -> None:
        reporter = build_reporter(config, context, sinks=[])
        reporter.begin_run(0, 100, samples=0, tokens=0)
        for iteration in (1, 2, 3, 4):
            reporter.observe(step_result(iteration))
        reporter.report_steps(METRICS)
        reporter.close()

    on_threads(ParallelConfig(world_size=2), rank)
    lines = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "memory (MB)" in line]
    assert [line.split(" iterations")[0] for line in lines] == ["[Rank 0] (after 2", "[Rank 0] (after 4"]
    assert all("| used on the device: " in line for line in lines)


CPU = torch.device("cpu")


def test_memory_line_of_a_cpu():
    line = memory_line(3, 10, torch.device("cpu"), whole_device=True)
    size = r"(\d+\.\d\d)"
    match = re.fullmatch(
        rf"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| resident: {size} \| max resident: {size} \| "
        rf"used on the device: {size}",
        line,
    )
    resident, _, used = map(float, match.groups())
    assert 10 < resident < used
    assert memory_tags(torch.device("cpu")) == {}
