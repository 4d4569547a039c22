"""Pool of processes for one test session, started at first use.

A new process imports torch for seconds; a job in an existing process needs only a rendezvous. CPU ranks are forked from
a server that has imported torch; a forked process could not use CUDA. A job that times out is a deadlock: the stacks of
all ranks are collected, the processes are replaced, and the test fails with the stacks.
"""

import atexit
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_moe.config.parallel import ParallelConfig
from tests.helpers.rank_worker import Answer, Job, main

GRACE_SECONDS = 5.0
"""Time limit in seconds for other ranks to end after one has failed."""
START_SECONDS = 600.0
MEETING_SECONDS = 300.0
"""Time limit in seconds for ranks to connect on a busy machine; not part of a job's timeout."""
STACK_SECONDS = 30.0
"""Time limit in seconds for a process to print its stacks."""
PRELOADED = ("tests.helpers.rank_worker", "tests.helpers.preloaded")
"""Imports of the server from which processes are forked. One server serves a test session."""
_RESERVED: list[socket.socket] = []


def free_port(among: Sequence[int] = (0,)) -> int:
    """Reserves a TCP port of this host, one of `among` if given, for a server that is started later.

    The port stays reserved while this process lives: the socket that holds it never listens, so a server with
    SO_REUSEADDR, such as torch's store, can use it, and the system gives it to no other process.
    """
    for port in random.sample(among, len(among)):
        holder = socket.socket(socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET)
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with suppress(OSError):
            holder.bind(("", port))
            holder.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # set after bind; otherwise two sessions could share the port
            _RESERVED.append(holder)
            return holder.getsockname()[1]
        holder.close()
    raise OSError(f"no port is free among {len(among)}")


class RankFailure(AssertionError):
    """A rank raised, died, or timed out."""


class Worker:
    """A worker process and the parent's end of its pipe."""

    def __init__(self, folder: Path, number: int, method: Literal["forkserver", "spawn"]) -> None:
        self.pipe, theirs = Pipe()
        self.output = folder / f"worker-{number}.txt"
        self.output.touch()
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload(list(PRELOADED))
        self.process = context.Process(target=main, args=(theirs, self.output))
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        """Waits for the imports of the process, which are not part of a job's time."""
        if not self.ready:
            _values([self], START_SECONDS)
            self.ready = True

    def stack(self) -> str:
        """Stacks of all threads of the process, or its last output if it has died."""
        if self.process.is_alive():
            before = self.output.stat().st_size
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + STACK_SECONDS
            while not (said := self.output.read_bytes()[before:]).endswith(b" in <module>\n"):  # the outermost frame
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            return said.decode(errors="replace")
        return f"died with exit code {self.process.exitcode}:\n" + self.output.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@dataclass
class Pool:
    """Workers 0 ... n - 1; worker r is rank r of every job with more than r ranks."""

    folder: Path
    method: Literal["forkserver", "spawn"]
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
        """Runs `function(context, *arguments)` on every rank; returns the results by rank. Raises RankFailure."""
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
        return Worker(self.folder, next(self.numbers), self.method)

    def _replace(self, workers: Sequence[Worker]) -> None:
        """Replaces workers that may hang or hold a partial process group."""
        for worker in workers:
            worker.kill()
        self.workers[: len(workers)] = [self._worker() for _ in workers]


def start_pool(method: Literal["forkserver", "spawn"]) -> Pool:
    """Empty pool that is closed when this process exits."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    pool = Pool(Path(folder.name), method)
    atexit.register(lambda: (pool.close(), folder.cleanup()))
    return pool


def _values(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Answers of all workers. Raises the first error, followed by the last line of each other one."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(workers):
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:  # polled after the deadline too, for answers that arrived while this process was not scheduled
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
        worker.process.join()
        return Answer(trace=worker.stack())


def _report(failed: Sequence[int], missing: Sequence[int], answers: dict[int, Answer], size: int) -> str:
    """Trace of the first failed rank, and the last line of each other one."""
    first = failed[0]
    lines = [f"rank {first} of {size} failed first:\n{answers[first].trace}"]
    lines += [f"rank {rank}: {(answers[rank].trace or '').strip().splitlines()[-1]}" for rank in failed[1:]]
    lines += [f"rank {rank}: had not come back {GRACE_SECONDS:g} s later" for rank in missing]
    return "\n".join(lines)
