"""Ranks of a run as forked processes, so that torch is loaded once."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import tests.helpers.preloaded  # noqa: F401
from megatron_moe.config.faults import ALLOWED
from pretrain_moe import main
from tests.helpers.process_pool import free_port

_PATIENCE_SECONDS = 60.0
_FOLLOW_SECONDS = 30.0
"""Seconds after which torchrun kills the other ranks after a failure."""


class Ranks:
    """One launch of a run; the output of each rank is written to a file in the folder `said`.

    The parent must have no threads when it forks.
    """

    def __init__(self, argvs: Sequence[Sequence[str]], said: Path) -> None:
        """`argvs`: command line of every rank."""
        said.mkdir(exist_ok=True)
        self._said = said
        self._begun = time.time()
        port = free_port()
        size = len(argvs)
        self._pids = [_fork(argv, rank, size, port, said / f"{rank}.txt") for rank, argv in enumerate(argvs)]
        self._codes: dict[int, int] = {}
        """Exit codes of ended ranks by process id."""

    def said(self) -> str:
        """The last output of all ranks."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self._said.iterdir()))

    def wait_until_trained(self, run: Path, iteration: int) -> None:
        """Waits until this launch has reported the iteration or a rank has ended."""
        while iteration and not self._look():
            metrics = run / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_mtime > self._begun and _last_iteration(metrics) >= iteration:
                return
            time.sleep(0.05)

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._look():
            time.sleep(0.02)

    def send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self._pids[rank] not in self._codes:
                os.kill(self._pids[rank], number)

    def wait(self, patience: float = _PATIENCE_SECONDS, follow: float = _FOLLOW_SECONDS) -> list[int] | None:
        """Waits for all ranks and returns their exit codes; None if no rank ended in time.

        Like launchers, kills the remaining ranks some time after the first has ended.
        """
        until = time.monotonic() + patience
        ended, impatient = False, False
        while len(self._codes) < len(self._pids):
            if self._look() and not ended:
                ended, until = True, time.monotonic() + follow
            if time.monotonic() > until:
                impatient = impatient or not ended
                for pid in set(self._pids) - set(self._codes):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return [self._codes[pid] for pid in self._pids] if not impatient else None

    def _look(self) -> bool:
        """Collects exit codes. Returns True if a rank has ended."""
        for pid in self._pids:
            if pid not in self._codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return bool(self._codes)


def _last_iteration(metrics: Path) -> int:
    """Iteration of the last log line; 0 if the line is incomplete."""
    try:
        return int(json.loads(metrics.read_bytes()[-4000:].splitlines()[-1])["iteration"])
    except (ValueError, IndexError):
        return 0


def _fork(argv: Sequence[str], rank: int, num_ranks: int, port: int, said: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ALLOWED: 1}
        os.environ.update({name: str(value) for name, value in place.items()})
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = main(argv, os.environ)
    except BaseException:  # noqa: BLE001  printed, as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
