"""Two real ranks started by the scripts of tools/launch.py, under torchrun and a stand-in for srun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments, losses, make_data, succeed
from tests.faults.processes import status
from tests.helpers.process_pool import free_port
from tests.helpers.programs import run_ranks
from tests.helpers.ranks import REPOSITORY, child_environment
from tests.scripts.stubs import logged_commands, write_stubs

RANKS = ["--gpus-per-node", "2", "--submit", "--name", "tiny"]


def launch(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "launch.py"), *RANKS, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def command_line(folder: Path) -> list[str]:
    return arguments(make_data(folder), None, "--train-iters", "2", "--lr-warmup-iters", "0", "--no-plots")


def expected(folder: Path, flags: list[str]) -> dict[int, float]:
    """Losses of two ranks that no launcher starts."""
    succeed(run_ranks(2, [*flags, "--run-dir", "runs/forked"], cwd=folder))
    return losses(folder / "runs" / "forked")


@pytest.mark.slow
def test_two_ranks_under_torchrun_train_as_without_a_launcher(tmp_path):
    """Nightly, because the test of Ctrl-C below starts two ranks under torchrun too."""
    flags = command_line(tmp_path)
    environment = write_stubs(tmp_path, tasks=2)
    local = launch(tmp_path, environment, "--launcher", "torchrun", *flags, "--run-dir", "runs/torchrun")
    assert local.returncode == 0, local.stderr
    assert "2 ranks" in (tmp_path / "runs" / "torchrun" / "run.yaml").read_text()
    assert losses(tmp_path / "runs" / "torchrun") == expected(tmp_path, flags)


def test_two_ranks_under_srun_train_as_without_a_launcher(tmp_path):
    flags = command_line(tmp_path)
    job = free_port(range(20000, 40000)) - 20000  # the ranks derive the port from the job id
    environment = write_stubs(tmp_path, tasks=2) | {"SLURM_JOB_ID": str(job)}
    submitted = launch(tmp_path, environment, *flags, "--run-dir", "runs/slurm")
    assert submitted.returncode == 0, submitted.stderr
    script = tmp_path / "runs" / "slurm" / "job.sbatch"
    assert logged_commands(tmp_path) == [f"sbatch {script}"], "submitting hands over the written script"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs" / "slurm") == expected(tmp_path, flags)
    assert sorted(losses(tmp_path / "runs" / "slurm")) == [1, 2]


@pytest.mark.parametrize(("visible", "ranks"), [(None, 4), ("0,2", 2), ("", 1), ("0,1,2,3,4,5", 4)])
def test_the_launch_script_starts_one_rank_per_visible_gpu(tmp_path, visible, ranks):
    for name, line in (
        ("nvidia-smi", "printf 'GPU 0: x\\nGPU 1: x\\nGPU 2: x\\nGPU 3: x\\n'"),
        ("python", 'echo "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    script = ["bash", str(REPOSITORY / "scripts" / "launch.sh"), "--recipe", "mine"]
    shown = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert f"--nproc-per-node {ranks} " in shown


def test_ctrl_c_saves_the_run_of_a_launch_script(tmp_path):
    """A terminal sends the signal to the script and all its children that have no process group of their own."""
    run = tmp_path / "run"
    flags = arguments(make_data(tmp_path), run, "--train-iters", "100000", "--eval-iters", "0", "--no-plots")
    process = subprocess.Popen(
        ["bash", str(REPOSITORY / "scripts" / "launch.sh"), *flags],
        env=child_environment(RANKS_PER_NODE="2", PYTHON=sys.executable),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(" iteration        2/" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors, errors
    assert "all iterations are saved; the same command continues from here" in shown + errors
    ended = status(run)
    assert (ended["code"], ended["iteration"]) == (ExitCode.PREEMPTED_SAVED, ended["last_checkpoint"])
