"""One process of the pool: waits for jobs, runs each as one rank, sends back what it returned.

On the CPU every job gets a fresh gloo group. On GPUs the process joins one NCCL group that stands as long as it lives.

Started by `tests/helpers/process_pool.py`, which has the other end of the pipe.
"""

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import Handles, ParallelContext


@dataclass(frozen=True)
class Job:
    """One rank's part of a job. Everything in it is plain data or has an import path."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    config: ParallelConfig
    rank: int
    place: str
    """Where the ranks of this job, and only they, meet: a URL that torch.distributed understands."""
    dtype: torch.dtype
    seed: int
    on_gpu: bool = False
    """Rank r computes on GPU r. All jobs of a pool have the same number of ranks then."""


@dataclass(frozen=True)
class Answer:
    """What a rank has to say: a value, that it is ready, or the trace of its error."""

    value: Any = None
    trace: str | None = None
    time: float = 0.0
    """Of the error, on the clock of this host; several may be read at once. Who died without a word came first."""


def serve(job: Job, handles: Handles) -> Iterator[Answer]:
    """First that all ranks have met, then what the job's function returns on this rank; or the error instead.

    `handles` are the communicators of the GPUs' process group.
    """
    try:
        context = _on_gpu(job, handles) if job.on_gpu else _on_cpu(job)
        yield Answer()
        yield Answer(job.function(context, *job.arguments))
    except BaseException:  # noqa: BLE001  told to the test, which fails with it
        yield Answer(trace=traceback.format_exc(), time=time.monotonic())


def leave(job: Job) -> None:
    """Ends the job's own process group: whoever still waits for this rank learns that it has gone."""
    if dist.is_initialized() and not job.on_gpu:
        dist.destroy_process_group()


def _on_cpu(job: Job) -> ParallelContext:
    _meet(job, "gloo", None)
    context = ParallelContext.within(job.config, job.rank, dtype=job.dtype, seed=job.seed)
    # A rank may return at once and close its connections, which must not meet one that still opens them.
    dist.barrier()
    return context


def _on_gpu(job: Job, handles: Handles) -> ParallelContext:
    device = torch.device("cuda", job.rank)
    if not dist.is_initialized():
        torch.cuda.set_device(device)
        _meet(job, "nccl", device)
    return ParallelContext.within(job.config, job.rank, dtype=job.dtype, device=device, seed=job.seed, handles=handles)


def _meet(job: Job, backend: str, device: torch.device | None) -> None:
    dist.init_process_group(
        backend,
        init_method=job.place,
        rank=job.rank,
        world_size=job.config.world_size,
        # Minutes of patience: the watchdog of the pool is quicker and sees all ranks.
        timeout=timedelta(minutes=5),
        device_id=device,
    )


def main(descriptor: int) -> None:
    """Serves jobs that come through the pipe with this file descriptor, until it closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipe = Connection(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(Answer()))  # ready
    handles: Handles = {}
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # The answer first: an error is known before the errors of those that it abandons.
        for answer in serve(job, handles):
            pipe.send_bytes(pickle.dumps(answer))
        leave(job)
