"""Preemption by signals: all ranks stop after the same iteration, with a checkpoint and the right exit code."""

import re
import signal
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments
from tests.faults.processes import status
from tests.helpers.checkpoint_files import verify
from tests.helpers.programs import PROGRAM, Program, run_script, start_ranks

ENDLESS = ("--train-iters", "100000", "--eval-iters", "0", "--exit-signal-handler")


def saved(run: Path) -> list[int]:
    folders = sorted((run / "checkpoints").glob("iter_*"))
    assert all(verify(folder) == [] for folder in folders)
    return [int(folder.name.removeprefix("iter_")) for folder in folders]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_both_with_a_checkpoint(data: str, tmp_path: Path, number: int) -> None:
    """Every rank exits with code 75, and the same command resumes. Ctrl-C needs no flag."""
    run = tmp_path / "run"
    more = ENDLESS if number == signal.SIGTERM else (*ENDLESS[:-1], "--use-distributed-optimizer")
    argv = arguments(data, run, *more)
    ranks = start_ranks(2, argv)
    ranks[1].wait_until_printed(" iteration        3/")
    ranks[1].send(number)
    done = [rank.wait() for rank in ranks]
    assert [each.returncode for each in done] == [ExitCode.PREEMPTED_SAVED] * 2, done
    assert not any("FutureWarning" in each.stderr for each in done), "torch renames collectives"
    found = status(run)
    assert (found["state"], found["code"]) == ("preempted", 75)
    assert f"because of {signal.Signals(number).name}" in found["sentence"]
    assert saved(run) == [found["iteration"]] == [found["last_checkpoint"]]
    if number == signal.SIGINT:
        return
    more = ["--train-iters", str(found["iteration"] + 1), "--override-opt-param-scheduler"]
    resumed = run_script(PROGRAM, *argv, *more, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert saved(run) == [found["iteration"], found["iteration"] + 1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_first_step_has_nothing_to_save(data: str, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    program = Program(PROGRAM, *arguments(data, run, *ENDLESS))
    program.wait_until_printed("using world size")
    program.send(number)
    done = program.wait()
    assert done.returncode == ExitCode.PREEMPTED_SAVED, done
    assert saved(run) in ([], [status(run)["iteration"]])


@pytest.mark.slow
def test_ctrl_c_saves_and_a_second_one_exits_at_once(data: str, tmp_path: Path) -> None:
    """Steps take about a second. The second signal comes 0.2 s after the first, during the same step."""
    run = tmp_path / "run"
    argv = arguments(data, run, *ENDLESS[:-1], "--global-batch-size", "64")
    first = Program(PROGRAM, *argv)
    first.wait_until_printed(" iteration        1/")
    first.send(signal.SIGINT)
    done = first.wait()
    assert done.returncode == ExitCode.PREEMPTED_SAVED, done
    last = max(saved(run))
    assert "all iterations are saved; the same command continues from here" in done.stdout + done.stderr
    assert (status(run)["iteration"], status(run)["last_checkpoint"]) == (last, last)

    second = Program(PROGRAM, *argv)
    second.wait_until_printed(f" iteration {last + 1:8d}/")
    time.sleep(0.2)  # the line is printed at the end of the next step
    second.send(signal.SIGINT)
    time.sleep(0.2)
    second.send(signal.SIGINT)
    done = second.wait()
    assert done.returncode == ExitCode.INTERRUPTED == 130, done
    assert re.findall(r" iteration +(\d+)/", done.stdout)[0] == str(last + 1), "resumes after the first run"
    assert "SIGINT: exiting after this step; a second signal exits immediately" in done.stderr
    lost = rf"the last iteration was ({last + 1}|{last + 2}); the same command continues from the checkpoint of {last}"
    assert re.search(lost, done.stderr), "the interrupted step, the third, is not finished"
    assert saved(run) == [last]


def test_a_run_without_checkpoints_reports_lost_steps(data: str, tmp_path: Path) -> None:
    """A preempted run without checkpoints exits with code 76."""
    program = Program(PROGRAM, *arguments(data, None, *ENDLESS))
    program.wait_until_printed(" iteration        2/")
    program.send(signal.SIGTERM)
    done = program.wait()
    assert done.returncode == ExitCode.PREEMPTED_UNSAVED, done
    words = "without a checkpoint of this iteration: no --save folder, so the trained iterations are lost; give --save"
    assert words in done.stdout + done.stderr
