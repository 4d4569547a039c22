"""Worker process of the pool: receives jobs, runs each as one rank, and returns the result.

On the CPU every job has a fresh gloo group. On GPUs the process joins one group for its whole lifetime: NCCL, or gloo
if ranks share GPUs because the machine has fewer. In that case, kernels of symmetric memory can be tested with all
ranks on one GPU, but collectives cannot be captured in CUDA graphs.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import Handles, ParallelContext
from tests.helpers.contexts import context_of_rank


@dataclass(frozen=True)
class Job:
    """Part of a job for one rank; contains plain data and importable objects only."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    config: ParallelConfig
    rank: int
    place: str
    """Rendezvous URL of the ranks of this job."""
    dtype: torch.dtype
    seed: int
    on_gpu: bool = False
    """True if rank r uses GPU r modulo the number of GPUs. All jobs of a pool then have the same number of ranks."""


@dataclass(frozen=True)
class Answer:
    """Message of a rank: it is ready, a result, or the traceback of an error."""

    value: Any = None
    trace: str | None = None
    time: float = 0.0
    """Time of the error by this host's clock; 0 for a process that died without a report, which counts as first."""


def serve(job: Job, handles: Handles) -> Iterator[Answer]:
    """Yields an answer when all ranks have connected, then the result of the job's function; or the error instead.

    `handles` are the communicators of the GPUs' process group.
    """
    try:
        context = _on_gpu(job, handles) if job.on_gpu else _on_cpu(job)
        yield Answer()
        yield Answer(job.function(context, *job.arguments))
    except BaseException:  # noqa: BLE001  sent to the test, which then fails
        yield Answer(trace=traceback.format_exc(), time=time.monotonic())


def leave(job: Job) -> None:
    """Destroys the job's process group, so that ranks waiting for this one get an error."""
    if dist.is_initialized() and not job.on_gpu:
        dist.destroy_process_group()


def _on_cpu(job: Job) -> ParallelContext:
    _meet(job, "gloo", None)
    context = context_of_rank(job.config, job.rank, dtype=job.dtype, seed=job.seed)
    # A rank that returns early must not close its connections while another still opens them.
    dist.barrier()
    return context


def _on_gpu(job: Job, handles: Handles) -> ParallelContext:
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", job.rank % num_gpus)
    if not dist.is_initialized():
        torch.cuda.set_device(device)
        shares = num_gpus < job.config.world_size
        if shares:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        _meet(job, "gloo" if shares else "nccl", None if shares else device)
    return context_of_rank(job.config, job.rank, dtype=job.dtype, device=device, seed=job.seed, handles=handles)


def _meet(job: Job, backend: str, device: torch.device | None) -> None:
    dist.init_process_group(
        backend,
        init_method=job.place,
        rank=job.rank,
        world_size=job.config.world_size,
        # Longer than the pool's own timeout, which reports all ranks.
        timeout=timedelta(minutes=5),
        device_id=device,
    )


def main(pipe: Connection, output: Path) -> None:
    """Runs jobs received through the pipe until it is closed; prints to the file `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(Answer()))  # ready
    handles: Handles = {}
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Answer before leaving, so that this error arrives before the resulting errors of other ranks.
        for answer in serve(job, handles):
            pipe.send_bytes(pickle.dumps(answer))
        leave(job)
