"""Runs functions and programs on several ranks: threads, pooled gloo processes, GPUs, or torchrun."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.contexts import context_of_rank
from tests.helpers.process_pool import Pool, start_pool
from tests.helpers.thread_p2p import ThreadMessages

Result = TypeVar("Result")
REPOSITORY = Path(__file__).parents[2]


def on_threads(
    config: ParallelConfig,
    function: Callable[[ParallelContext], Result],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 1234,
) -> list[Result]:
    """Runs `function(context)` on ranks as threads with torch's in-memory process group; returns the results by rank.

    All ranks run on one core. Every torch op releases the interpreter lock, so that on several cores the ranks wake
    each other at every op, which takes several times the CPU time of the ops. Raises the first error.
    """
    world_size = config.world_size
    core = ctypes.CDLL(None).sched_getcpu()
    results: list = [None] * world_size
    errors: dict[int, BaseException] = {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    if not hasattr(ThreadLocalWorld, "comms"):
        # torch 2.11 reads this list when the in-memory group is destroyed
        ThreadLocalWorld.comms = property(lambda world: [])
    store, messages = dist.HashStore(), ThreadMessages()

    def rank_main(rank: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
            # Backward runs in the calling thread, so that its collectives stay on this rank.
            torch.autograd.set_multithreading_enabled(False)
            context = context_of_rank(config, rank, dtype=dtype, seed=seed, make_links=messages.make_links)
            results[rank] = function(context)
        except BaseException as error:  # noqa: BLE001  raised below
            errors[rank] = error
            messages.close()
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    # A collection inside `ast.parse`, which numpy.load calls, may switch to a thread that parses too. Python 3.11 then
    # raises SystemError, because threads share its recursion depth.
    collects = gc.isenabled()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout=300)
            assert not thread.is_alive(), f"rank {rank} of {world_size} still runs after 300 s: deadlock"
    finally:
        if collects:
            gc.enable()
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        # The first error is the cause; later ones are abandoned collectives.
        raise next(iter(errors.values()))
    assert not messages.unread(), f"sent and never received: {messages.unread()}"
    return results


@cache
def _pool() -> Pool:
    return start_pool("forkserver")


@cache
def _gpu_pool(num_gpus: int) -> Pool:
    return start_pool("spawn")


def on_processes(
    config: ParallelConfig,
    function: Callable[..., Result],
    *arguments: Any,
    dtype: torch.dtype = torch.float64,
    seed: int = 1234,
    timeout: float = 300.0,
) -> list[Result]:
    """Runs `function(context, *arguments)` on gloo processes; returns the results by rank.

    The processes are started once per test session; every job creates a new process group. `function` is defined at
    the top level of an importable module; arguments and results are picklable. Raises `RankFailure` with the trace of
    the first failing rank, or with the stacks of all ranks after `timeout` seconds.
    """
    return _pool().run(config, function, arguments, dtype=dtype, seed=seed, timeout=timeout)


def on_gpus(
    config: ParallelConfig,
    function: Callable[..., Result],
    *arguments: Any,
    dtype: torch.dtype = torch.float64,
    seed: int = 1234,
    timeout: float = 60.0,
) -> list[Result]:
    """Runs `on_processes` with one GPU per rank. All jobs with the same number of ranks share one NCCL process group
    and its communicators until one fails."""
    pool = _gpu_pool(config.world_size)
    return pool.run(config, function, arguments, dtype=dtype, seed=seed, timeout=timeout, on_gpu=True)


def child_environment(**variables: str) -> dict[str, str]:
    """Environment of this process for a program of the repository, with one thread and more variables. Kernels are not
    interpreted, so that the program does not import them."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **variables}


def run_python(
    *command: str | Path, cwd: Path = REPOSITORY, timeout: float = 600.0, **variables: str
) -> subprocess.CompletedProcess:
    """Runs `python COMMAND`, by default in the repository, and returns its exit code and output."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=child_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
