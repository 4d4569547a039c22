"""Two real ranks started by the scripts of tools/launch.py, under torchrun and a stand-in for srun."""

import subprocess
import sys
from pathlib import Path

from tests.end_to_end.tiny_run import arguments, losses, make_data
from tests.helpers.ranks import REPOSITORY, free_port
from tests.scripts.stubs import logged_commands, write_stubs

RANKS = ["--gpus-per-node", "2", "--submit", "--name", "tiny"]


def launch(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "launch.py"), *RANKS, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_two_ranks_train_the_same_under_torchrun_and_under_srun(tmp_path):
    data = make_data(tmp_path)
    job = free_port(range(20000, 40000)) - 20000  # the ranks derive the port from the job id
    environment = write_stubs(tmp_path, tasks=2) | {"SLURM_JOB_ID": str(job)}
    flags = arguments(data, None, "--train-iters", "2", "--lr-warmup-iters", "0", "--no-plots")
    local = launch(tmp_path, environment, "--launcher", "torchrun", *flags, "--run-dir", "runs/torchrun")
    assert local.returncode == 0, local.stderr
    assert "2 ranks" in (tmp_path / "runs" / "torchrun" / "run.yaml").read_text()

    submitted = launch(tmp_path, environment, *flags, "--run-dir", "runs/slurm")
    assert submitted.returncode == 0, submitted.stderr
    script = tmp_path / "runs" / "slurm" / "job.sbatch"
    assert logged_commands(tmp_path) == [f"sbatch {script}"], "submitting hands over the written script"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs" / "slurm") == losses(tmp_path / "runs" / "torchrun")
    assert sorted(losses(tmp_path / "runs" / "slurm")) == [1, 2]
