"""Runs programs of the repository in processes forked from a server that has imported torch and megatron_moe.

Startup takes milliseconds instead of three seconds of CPU time. Tests of startup itself (imports, launchers,
environment) use `run_python` of `tests/helpers/ranks.py` or `subprocess`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.process_pool import PRELOADED, free_port
from tests.helpers.ranks import REPOSITORY, child_environment

TIMEOUT_S = 600.0
PROGRAM = REPOSITORY / "pretrain_moe.py"


class Program:
    """A running `python SCRIPT ARGUMENTS`."""

    def __init__(
        self, *words: str | Path, cwd: Path = REPOSITORY, stdout: Path | None = None, **variables: str
    ) -> None:
        """`words`: script and arguments. `stdout`: file or device that receives the output instead of `output`.
        `variables`: additions to the environment."""
        self._words = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        self._streams = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._streams:
            path.touch()
        streams = [stdout or self._streams[0], self._streams[1]]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._process = context.Process(target=_main, args=(self._words, cwd, child_environment(**variables), streams))
        self._process.start()

    @property
    def output(self) -> str:
        """What the program has written so far: stdout, then stderr."""
        return "".join(path.read_text(errors="replace") for path in self._streams)

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait_until_printed(self, words: str) -> None:
        """Waits until the output contains `words`. Raises AssertionError if the program ends without them."""
        running = True
        while words not in self.output:
            assert running, f"ended without printing {words!r}: {self.output[-3000:]}"
            running = self.is_running  # checked before reading, so that the last output is not missed
            time.sleep(0.02)

    def send(self, number: int) -> None:
        """Sends a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kills the program if it runs."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess:
        """Exit code and output of the ended program. Kills it and raises TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self._words, timeout, self.output)
        stdout, stderr = (path.read_text(errors="replace") for path in self._streams)
        return subprocess.CompletedProcess(self._words, self._process.exitcode, stdout, stderr)


def run_script(
    *words: str | Path, cwd: Path = REPOSITORY, timeout: float = TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT ARGUMENTS` to its end."""
    return Program(*words, cwd=cwd, **variables).wait(timeout)


def start_ranks(
    num_ranks: int, arguments: Sequence[str | Path], *, cwd: Path = REPOSITORY, ranks_per_host: int | None = None
) -> list[Program]:
    """Starts `pretrain_moe.py ARGUMENTS` on gloo processes as a launcher would, on one host or on emulated hosts."""
    local = ranks_per_host or num_ranks
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    sizes = {"WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{local}"}
    return [
        Program(PROGRAM, *arguments, cwd=cwd, RANK=f"{rank}", LOCAL_RANK=f"{rank % local}", **sizes, **meeting)
        for rank in range(num_ranks)
    ]


def run_ranks(num_ranks: int, arguments: Sequence[str | Path], *, cwd: Path) -> subprocess.CompletedProcess:
    """Runs `pretrain_moe.py ARGUMENTS` on gloo processes; returns the first exit code that is not 0, and all output."""
    ranks = start_ranks(num_ranks, arguments, cwd=cwd)
    try:
        done = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    code = next((each.returncode for each in done if each.returncode), 0)
    return subprocess.CompletedProcess(
        done[0].args, code, "".join(each.stdout for each in done), "".join(each.stderr for each in done)
    )


def _main(words: Sequence[str], cwd: Path, environment: Mapping[str, str], streams: Sequence[Path]) -> None:
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
