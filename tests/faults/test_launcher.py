"""Death of the launcher, and status.json of launches that fail before the rendezvous."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.resilience.requeue import decide_and_record
from megatron_moe.resilience.run_status import STARTED
from tests.end_to_end.tiny_run import arguments
from tests.faults.processes import TIMEOUT, read_until, start, status
from tests.helpers.process_pool import free_port
from tests.helpers.programs import PROGRAM, Program, run_script
from tests.helpers.ranks import REPOSITORY, child_environment

ENDLESS = ("--train-iters", "100000", "--eval-iters", "0")
TORCHRUN = ("TORCHELASTIC_RUN_ID=x", "RANK=0", "WORLD_SIZE=1")
LAUNCHER = """
import ctypes, importlib.util, os, subprocess, sys
from pathlib import Path
(torch,) = importlib.util.find_spec("torch").submodule_search_locations
ctypes.CDLL(str(Path(torch) / "lib" / "libtorch_global_deps.so"))  # ranks recognise torchrun by its libraries
rank = subprocess.Popen(sys.argv[1:])
print(f"rank is process {rank.pid}", flush=True)
rank.wait()
"""


def test_a_rank_ends_when_its_launcher_is_killed(data: str, tmp_path: Path) -> None:
    """The rank releases its GPU, and the run is restarted."""
    run, since = tmp_path / "run", time.time()
    program = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *arguments(data, run, *ENDLESS)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "env", *TORCHRUN, *program],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rank = os.pidfd_open(int(read_until(launcher, "rank is process").split()[-1]))
    read_until(launcher, " iteration        2/")
    launcher.kill()
    ended = select.select([rank], [], [], 30.0)[0]
    if not ended:
        signal.pidfd_send_signal(rank, signal.SIGKILL)
    said = launcher.communicate(timeout=TIMEOUT)[0]
    assert ended, said
    assert f"the launcher of rank 0 (process {launcher.pid}) died; this rank ends as well" in said
    assert (status(run)["code"], status(run)["rank"]) == (ExitCode.LAUNCHER, 0)
    assert decide_and_record(run, 137, since=since, now=time.time()).reason == "the launcher of a rank died"


def test_a_rank_ends_when_its_launcher_died_before_it_began(data: str, tmp_path: Path) -> None:
    """A rank that survived its launcher would continue unsupervised and keep the lock of the run folder."""
    run = tmp_path / "run"
    program = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *arguments(data, run, *ENDLESS)]
    waits = 'until [ -e "$0" ]; do sleep 0.01; done; exec env "$@"'
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "sh", "-c", waits, str(tmp_path / "go"), *TORCHRUN, *program],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rank = os.pidfd_open(int(read_until(launcher, "rank is process").split()[-1]))
    launcher.kill()
    launcher.wait()
    (tmp_path / "go").touch()
    ended = select.select([rank], [], [], 30.0)[0]
    if not ended:
        signal.pidfd_send_signal(rank, signal.SIGKILL)
    said = launcher.communicate(timeout=TIMEOUT)[0]
    assert ended and "the launcher of rank 0 died before this rank began" in said, said
    assert status(run)["code"] == ExitCode.LAUNCHER


def test_a_rank_without_a_launcher_continues_after_its_parent_exits(tmp_path: Path) -> None:
    """The parent is the user's shell if torchrun is not used, for example under nohup."""
    code = "import time; print('ready', flush=True); time.sleep(3); print('done', flush=True)"
    watched = (
        "from pathlib import Path; from megatron_moe.config.parallel import ProcessInfo; "
        "from megatron_moe.resilience.launcher import LauncherWatch\n"
        "from megatron_moe.resilience.run_status import RunStatus as Status\n"
        f"with LauncherWatch(ProcessInfo(), Status(Path({str(tmp_path)!r}))): exec({code!r})"
    )
    shell = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-c", watched], stdout=subprocess.PIPE, text=True
    )
    read_until(shell, "ready")
    shell.kill()
    assert "done" in shell.communicate(timeout=TIMEOUT)[0]


@pytest.mark.parametrize("survivor", [0, 1])
def test_a_run_whose_rank_is_killed_at_start_is_restarted(data: str, tmp_path: Path, survivor: int) -> None:
    """The rank is killed before it imports torch. torchrun then ends the other rank and exits with code 1."""
    run, port, since = tmp_path / "run", free_port(), time.time()
    ranks = [start(arguments(data, run, *ENDLESS), rank, 2, port) for rank in range(2)]
    ranks[1 - survivor].kill()
    while not (run / STARTED).exists():
        assert ranks[survivor].poll() is None
        time.sleep(0.01)
    ranks[survivor].terminate()
    said = ranks[survivor].communicate(timeout=TIMEOUT)[0]
    assert ranks[survivor].returncode == -signal.SIGTERM, said
    assert decide_and_record(run, 1, since=since, now=time.time()).restart


def test_a_port_in_use_is_in_the_status_and_the_run_is_restarted(data: str, tmp_path: Path) -> None:
    run, since = tmp_path / "run", time.time()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        done = Program(PROGRAM, *arguments(data, run, *ENDLESS, "--distributed-timeout-minutes", "1"), **place).wait()
    assert done.returncode == ExitCode.RENDEZVOUS == status(run)["code"], done
    assert f"127.0.0.1:{port}" in status(run)["sentence"]
    assert decide_and_record(run, 1, since=since, now=time.time()).restart


def test_a_start_in_a_locked_folder_keeps_the_status_of_the_other_job(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Program(PROGRAM, *arguments(data, run, *ENDLESS))
    try:
        first.wait_until_printed(" iteration        1/")
        second = run_script(PROGRAM, *arguments(data, run, *ENDLESS))
        assert second.returncode == ExitCode.ENVIRONMENT, second
        assert "another job writes into the run folder" in second.stderr
        assert status(run)["state"] == "running"
        first.send(signal.SIGINT)
        assert first.wait().returncode == ExitCode.PREEMPTED_SAVED == status(run)["code"]
    finally:
        first.kill()
