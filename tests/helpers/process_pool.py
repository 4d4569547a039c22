"""A pool of processes that lives as long as the test session, started when first asked for.

Starting a process that has imported torch costs seconds; a job for one that waits costs a rendezvous. A job that takes
too long is a deadlock: every rank's stack is collected, the processes are replaced, and the test fails with the stacks.
"""

import atexit
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from megatron_moe.config.parallel import ParallelConfig
from tests.helpers.rank_worker import Answer, Job

REPOSITORY = Path(__file__).parents[2]
GRACE_SECONDS = 5.0
"""How long the other ranks may take to end once one has failed."""
START_SECONDS = 600.0
MEETING_SECONDS = 300.0
"""How long ranks may take to open their connections: on a machine with other work it is no part of a job's time."""
STACK_SECONDS = 30.0
"""How long a process may take to print its stacks."""
_RESERVED: list[socket.socket] = []


def free_port(among: Sequence[int] = (0,)) -> int:
    """A TCP port of this host, one of `among` if they are named, for a server that is still to be started.

    It stays reserved as long as this process lives: the socket that holds it never listens, so a server with
    SO_REUSEADDR, as torch's store is, may use it, but the system gives it to nobody else meanwhile.
    """
    for port in random.sample(among, len(among)):
        holder = socket.socket(socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET)
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with suppress(OSError):
            holder.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: two sessions could share it
            _RESERVED.append(holder)
            return holder.getsockname()[1]
        holder.close()
    raise OSError(f"no port is free among {len(among)}")


class RankFailure(AssertionError):
    """A rank raised, died, or never came back."""


class Worker:
    """One process and our end of its pipe."""

    def __init__(self, folder: Path, number: int) -> None:
        ours, theirs = Pipe()
        self.pipe: Connection = ours
        self.output = folder / f"worker-{number}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.helpers.rank_worker import main; main({theirs.fileno()})"],
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        """Importing torch takes seconds, and more of them when eight processes do it: not part of a job's time."""
        if not self.ready:
            _values([self], START_SECONDS)
            self.ready = True

    def stack(self) -> str:
        """What every thread of the process is doing now, or its last words when it has died."""
        if self.process.poll() is None:
            before = self.output.stat().st_size
            self.process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + STACK_SECONDS
            while not (said := self.output.read_bytes()[before:]).endswith(b" in <module>\n"):  # the outermost frame
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            return said.decode(errors="replace")
        return f"died with exit code {self.process.returncode}:\n" + self.output.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Pool:
    """Workers 0 … n - 1; worker r is rank r of every job that has so many ranks."""

    folder: Path
    workers: list[Worker] = field(default_factory=list)
    numbers: count = field(default_factory=count)

    def run(
        self,
        config: ParallelConfig,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        dtype: torch.dtype,
        seed: int,
        timeout: float,
        on_gpu: bool = False,
    ) -> list[Any]:
        """`function(context, *arguments)` on every rank; the results by rank. Raises RankFailure."""
        assert not on_gpu or len(self.workers) in (0, config.world_size), f"{len(self.workers)} ranks share a group"
        while len(self.workers) < config.world_size:
            self.workers.append(self._worker())
        workers = self.workers[: config.world_size]
        for worker in workers:
            worker.wait_until_ready()
        store = self.folder / f"store-{next(self.numbers)}"
        place = f"tcp://127.0.0.1:{free_port()}" if on_gpu else f"file://{store}"
        jobs = [Job(function, tuple(arguments), config, r, place, dtype, seed, on_gpu) for r in range(len(workers))]
        for worker, job in zip(workers, jobs, strict=True):
            worker.pipe.send_bytes(pickle.dumps(job))
        try:
            _values(workers, MEETING_SECONDS)
            return _values(workers, timeout)
        except BaseException:
            self._replace(workers)
            raise
        finally:
            store.unlink(missing_ok=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def _worker(self) -> Worker:
        return Worker(self.folder, next(self.numbers))

    def _replace(self, workers: Sequence[Worker]) -> None:
        """New processes for those that may hang or hold half a process group."""
        for worker in workers:
            worker.kill()
        self.workers[: len(workers)] = [self._worker() for _ in workers]


def start_pool() -> Pool:
    """An empty pool that ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    pool = Pool(Path(folder.name))
    atexit.register(lambda: (pool.close(), folder.cleanup()))
    return pool


def _values(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Waits for the answers of all; the first error, with the others folded below it, is raised."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(workers):
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:  # also behind the deadline: what has come while this process stood still counts
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            answers[rank] = _answer(workers[rank])
            if answers[rank].trace is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    missing = [rank for rank in range(len(workers)) if rank not in answers]
    failed = sorted((rank for rank in answers if answers[rank].trace is not None), key=lambda rank: answers[rank].time)
    if failed:
        raise RankFailure(_report(failed, missing, answers, len(workers)))
    if missing:
        stacks = [f"--- rank {rank} ---\n{worker.stack()}" for rank, worker in enumerate(workers) if rank in missing]
        raise RankFailure(
            f"ranks {missing} of {len(workers)} still ran after {timeout:g} s: deadlock?\n" + "\n".join(stacks)
        )
    return [answers[rank].value for rank in range(len(workers))]


def _answer(worker: Worker) -> Answer:
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.wait()
        return Answer(trace=worker.stack())


def _report(failed: Sequence[int], missing: Sequence[int], answers: dict[int, Answer], size: int) -> str:
    """The trace of the first rank that failed; of the others the last line each."""
    first = failed[0]
    lines = [f"rank {first} of {size} failed first:\n{answers[first].trace}"]
    lines += [f"rank {rank}: {(answers[rank].trace or '').strip().splitlines()[-1]}" for rank in failed[1:]]
    lines += [f"rank {rank}: had not come back {GRACE_SECONDS:g} s later" for rank in missing]
    return "\n".join(lines)
