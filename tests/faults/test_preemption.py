"""Preemption by signals: all ranks stop after the same iteration, with a checkpoint and the right exit code."""

import signal
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments
from tests.faults.processes import TIMEOUT, read_until, start, status
from tests.helpers.checkpoint_files import verify
from tests.helpers.ranks import free_port, run_program

ENDLESS = ("--train-iters", "100000", "--eval-iters", "0", "--exit-signal-handler")


def saved(run: Path) -> list[int]:
    folders = sorted((run / "checkpoints").glob("iter_*"))
    assert all(verify(folder) == [] for folder in folders)
    return [int(folder.name.removeprefix("iter_")) for folder in folders]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_both_with_a_checkpoint(data: str, tmp_path: Path, number: int) -> None:
    """Every rank exits with code 75, and the same command resumes. Ctrl-C needs no flag."""
    run, port = tmp_path / "run", free_port()
    more = ENDLESS if number == signal.SIGTERM else (*ENDLESS[:-1], "--use-distributed-optimizer")
    argv = arguments(data, run, *more)
    ranks = [start(argv, rank, 2, port) for rank in range(2)]
    read_until(ranks[1], " iteration        3/")
    ranks[1].send_signal(number)
    said = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.PREEMPTED_SAVED] * 2, said
    assert "FutureWarning" not in "".join(said), "torch renames collectives"
    found = status(run)
    assert (found["state"], found["code"]) == ("preempted", 75)
    assert f"because of {signal.Signals(number).name}" in found["sentence"]
    assert saved(run) == [found["iteration"]] == [found["last_checkpoint"]]
    if number == signal.SIGINT:
        return
    more = ["--train-iters", str(found["iteration"] + 1), "--override-opt-param-scheduler"]
    resumed = run_program([*argv, *more], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert saved(run) == [found["iteration"], found["iteration"] + 1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_first_step_has_nothing_to_save(data: str, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    process = start(arguments(data, run, *ENDLESS))
    read_until(process, "using world size")
    process.send_signal(number)
    said = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == ExitCode.PREEMPTED_SAVED, said
    assert saved(run) in ([], [status(run)["iteration"]])


def test_a_run_without_checkpoints_reports_lost_steps(data: str, tmp_path: Path) -> None:
    """The exit code is 76."""
    process = start(arguments(data, None, *ENDLESS))
    read_until(process, " iteration        2/")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == ExitCode.PREEMPTED_UNSAVED, said
    assert (
        "without a checkpoint of this iteration: no --save folder, so the trained iterations are lost; give --save"
        in said
    )
