"""One process of the pool: waits for jobs, runs each as one rank of a fresh gloo group, sends back what it returned.

Started by `tests/process_pool.py`, which has the other end of the pipe.
"""

import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.parallel import ParallelSpec


@dataclass(frozen=True)
class Job:
    """One rank's part of a job. Everything in it is plain data or has an import path."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    spec: ParallelSpec
    rank: int
    store: str
    """File through which the ranks of this job, and only they, meet."""
    dtype: torch.dtype
    seed: int


@dataclass(frozen=True)
class Answer:
    """What a rank has to say: a value, or the trace of its error."""

    value: Any = None
    trace: str | None = None


def run(job: Job) -> Answer:
    """The job's function on this rank, in a process group that exists for this job alone."""
    try:
        # Minutes of patience: the watchdog of the pool is quicker and sees all ranks.
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.store, job.spec.world_size),
            rank=job.rank,
            world_size=job.spec.world_size,
            timeout=timedelta(minutes=5),
        )
        context = ParallelContext.within(job.spec, job.rank, dtype=job.dtype, seed=job.seed)
        return Answer(job.function(context, *job.arguments))
    except BaseException:  # noqa: BLE001  told to the test, which fails with it
        return Answer(trace=traceback.format_exc())
    finally:
        # Whoever still waits for this rank learns that it has gone.
        if dist.is_initialized():
            dist.destroy_process_group()


def main(descriptor: int) -> None:
    """Serves jobs that come through the pipe with this file descriptor, until it closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipe = Connection(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(Answer()))  # ready
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(run(job)))
