"""Restarts by the job scripts, with stand-ins for the program and SLURM."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from arguments.environment import Variable
from arguments.slurm import Job, slurm_script, torchrun_script
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.resilience.requeue import read_history
from megatron_moe.resilience.run_status import StatusReport
from tests.helpers.ranks import REPOSITORY
from tests.scripts.stubs import logged_commands, write_stubs

BODY = (REPOSITORY / "scripts" / "slurm" / "body.sh").read_text()
FUTURE = time.time() + 1e6


def job_in(folder: Path) -> Job:
    return Job(
        name="mine",
        nodes=1,
        ranks_per_node=1,
        root=REPOSITORY,
        folder=folder,
        run_dir=folder / "run",
        python=str(folder / "stub_python"),
        flags=("--recipe", "mine"),
    )


def start(folder: Path, script: str, report: StatusReport | None, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a script whose program writes this report."""
    environment: Mapping[str, str] = write_stubs(folder) | {"STUB_PYTHON": sys.executable, **more}
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    if report is not None:
        (folder / "status").write_text(json.dumps(asdict(replace(report, time=FUTURE))))
        environment = {**environment, "STUB_STATUS": str(folder / "status"), "STUB_RUN_DIR": str(run_dir)}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)


def requeued(folder: Path) -> bool:
    return "scontrol requeue 4711" in logged_commands(folder)


def test_slurm_starts_a_preempted_run_again(tmp_path):
    report = StatusReport(state="preempted", code=int(ExitCode.PREEMPTED_SAVED))
    done = start(tmp_path, slurm_script(job_in(tmp_path), BODY), report, STUB_CODE="75")
    assert done.returncode == 0, done.stderr
    assert requeued(tmp_path) and "start again: it was preempted and has saved" in done.stdout


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.DATA, ExitCode.NUMERICS, ExitCode.MEMORY])
def test_slurm_does_not_requeue_after_a_flag_error(tmp_path, code):
    report = StatusReport(state="failed", code=int(code), sentence="the sentence")
    done = start(tmp_path, slurm_script(job_in(tmp_path), BODY), report, STUB_CODE=str(int(code)))
    assert done.returncode == code
    assert not requeued(tmp_path) and "leave it: exit code" in done.stdout


def test_slurm_starts_no_rank_on_nodes_without_the_project(tmp_path):
    image = tmp_path / "image.sqsh"
    job = replace(job_in(tmp_path), container=str(image))
    done = start(tmp_path, slurm_script(job, BODY), None)
    assert done.returncode == 3 and f"{image} does not exist on " in done.stderr
    assert [line.split()[0] for line in logged_commands(tmp_path)] == ["srun"]
    image.touch()
    assert start(tmp_path, slurm_script(job, BODY), None).returncode == 0
    assert [line.split()[0] for line in logged_commands(tmp_path)] == ["srun", "srun", "srun", "python"]


@pytest.mark.parametrize("missing", ["root", "python"])
def test_slurm_starts_no_rank_without_project_or_interpreter(tmp_path, missing):
    path = tmp_path / "missing"
    if missing == "root":
        job, named = replace(job_in(tmp_path), root=path), path / "pretrain_moe.py"
    else:
        job, named = replace(job_in(tmp_path), python=str(path)), path
    done = start(tmp_path, slurm_script(job, BODY), None)
    assert done.returncode == 3 and f"{named} does not exist on " in done.stderr
    (checked,) = logged_commands(tmp_path)
    assert checked.startswith("srun --ntasks=1 --ntasks-per-node=1 bash -c ")


@pytest.mark.parametrize("write", [partial(slurm_script, body=BODY), torchrun_script], ids=["slurm", "torchrun"])
def test_exports_of_the_setup_reach_the_ranks(tmp_path, write):
    job = replace(job_in(tmp_path), setup="# from site.sh:\nexport STUB_SITE=from_setup\n\n")
    done = start(tmp_path, write(job), None)
    assert done.returncode == 0, done.stderr
    assert "STUB_SITE=from_setup" in logged_commands(tmp_path)


def test_slurm_does_not_requeue_a_finished_run(tmp_path):
    done = start(tmp_path, slurm_script(job_in(tmp_path), BODY), StatusReport(state="finished", code=0))
    assert done.returncode == 0 and not requeued(tmp_path)
    assert [line.split()[0] for line in logged_commands(tmp_path)] == ["srun", "srun", "python"]


def test_slurm_stops_requeueing_without_progress(tmp_path):
    script, report = slurm_script(job_in(tmp_path), BODY), StatusReport(state="running", iteration=9)
    codes = [start(tmp_path, script, report, STUB_CODE="9").returncode for _ in range(3)]
    assert codes == [0, 0, 9]
    assert logged_commands(tmp_path).count("scontrol requeue 4711") == 2
    assert [entry.restart for entry in read_history(tmp_path / "run")] == [True, True, False]


def test_slurm_leaves_out_the_host_whose_weights_drifted(tmp_path):
    report = StatusReport(state="failed", code=int(ExitCode.DRIFT), host="node7")
    job = replace(job_in(tmp_path), slurm=(("exclude", "node3"),))
    assert start(tmp_path, slurm_script(job, BODY), report, STUB_CODE="12").returncode == 0
    assert "scontrol update JobId=4711 ExcNodeList=node3,node7" in logged_commands(tmp_path)


@pytest.mark.parametrize("moment", ["pretrain", "requeue"])
def test_a_job_that_slurm_ends_is_not_started_again(tmp_path, moment):
    report = StatusReport(state="preempted", code=int(ExitCode.PREEMPTED_SAVED))
    script = "export STUB_SIGNAL_TO=$$\n" + slurm_script(job_in(tmp_path), BODY)
    done = start(tmp_path, script, report, STUB_CODE="75", STUB_SIGNAL=moment)
    assert done.returncode == 75 and not requeued(tmp_path)


def test_torchrun_is_started_again_as_often_as_allowed(tmp_path):
    report = StatusReport(state="failed", code=int(ExitCode.HANG))
    done = start(tmp_path, torchrun_script(job_in(tmp_path)), report, STUB_CODE="1", MAX_RESTARTS="1")
    starts = [line for line in logged_commands(tmp_path) if "tools/torchrun.py" in line]
    assert done.returncode == 1 and len(starts) == 2
    assert "--nnodes 1 --nproc-per-node 1 --standalone" in starts[0] and starts[0].endswith("--recipe mine")


def test_torchrun_is_not_started_again_after_a_users_mistake(tmp_path):
    report = StatusReport(state="failed", code=int(ExitCode.DATA), sentence="the sentence")
    done = start(tmp_path, torchrun_script(job_in(tmp_path)), report, STUB_CODE="1")
    assert done.returncode == 1 and "leave it: exit code 4: the sentence" in done.stdout
    assert sum("tools/torchrun.py" in line for line in logged_commands(tmp_path)) == 1


def test_torchrun_on_several_machines_needs_a_rendezvous_endpoint(tmp_path):
    script = torchrun_script(replace(job_in(tmp_path), nodes=2))
    alone = start(tmp_path, script, None)
    assert alone.returncode != 0 and "NODE_RANK" in alone.stderr
    report = StatusReport(state="failed", code=int(ExitCode.HANG))
    start(tmp_path, script, report, NODE_RANK="1", MASTER_ADDR="host0", STUB_CODE="1")
    starts = [line for line in logged_commands(tmp_path) if "tools/torchrun.py" in line]
    assert len(starts) == 1, "of several machines none is started again alone"
    assert "--nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr host0 --master-port 29500" in starts[0]


@pytest.mark.parametrize("name", ["container", "flags", "python", "root", "SLURM_RESTART_COUNT", "NNODES"])
@pytest.mark.parametrize("write", [partial(slurm_script, body=BODY), torchrun_script], ids=["slurm", "torchrun"])
def test_a_variable_of_a_file_reaches_no_command_of_the_script(tmp_path, write, name):
    """Rejects names used by the script itself and values that arithmetic would evaluate."""
    value = f"a[$(touch {tmp_path / 'executed'})]"
    job = replace(job_in(tmp_path), variables=(Variable(name, value, "a file sets it"),))
    done = start(tmp_path, write(job), None)
    assert done.returncode == 0, done.stderr
    started = [line for line in logged_commands(tmp_path) if "pretrain_moe.py" in line]
    assert "touch" not in "".join(started) and started[-1].endswith(f"{REPOSITORY}/pretrain_moe.py --recipe mine")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("moment", ["pretrain", "requeue"])
def test_a_signal_ends_torchrun_for_good(tmp_path, moment):
    report = StatusReport(state="preempted", code=int(ExitCode.PREEMPTED_SAVED))
    script = f"export STUB_SIGNAL_TO=$$\n{torchrun_script(job_in(tmp_path))}"
    done = start(tmp_path, script, report, STUB_CODE="1", STUB_SIGNAL=moment)
    assert sum("tools/torchrun.py" in line for line in logged_commands(tmp_path)) == 1
    assert done.returncode != 0


@pytest.mark.parametrize("times", [1, 2])
def test_torchrun_receives_every_ctrl_c_once(tmp_path, times):
    """Another signal, that of the terminal, would end torchrun before its ranks have saved, as a second Ctrl-C does."""
    heard = tmp_path / "heard"
    stand_in = tmp_path / "stub_python"
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import signal, sys, time\n"
        "heard = []\n"
        "def hear(number, frame):\n"
        "    heard.append(signal.Signals(number).name)\n"
        "    print('heard', flush=True)\n"
        "for name in ('SIGINT', 'SIGTERM'):\n"
        "    signal.signal(getattr(signal, name), hear)\n"
        "print('ready', flush=True)\n"
        f"while len(heard) < {times}:\n"
        "    time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        f"open({str(heard)!r}, 'w').write(' '.join(heard))\n"
        "sys.exit(75)\n"
    )
    stand_in.chmod(0o755)
    script = ["bash", str(REPOSITORY / "scripts" / "launch.sh"), "--recipe", "mine"]
    environment = {**os.environ, "PYTHON": str(stand_in), "RANKS_PER_NODE": "1"}
    process = subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == b"heard\n"
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert heard.read_text().split() == ["SIGINT"] * times, "ranks save after it without --exit-signal-handler"
