"""Runs a function on several ranks: as threads of this process, as pooled gloo processes, or under torchrun."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
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
from tests.helpers.process_pool import Pool, free_port, start_pool
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
    """Runs `function(context)` on `spec.world_size` ranks as threads on torch's in-memory group; the results by rank.

    The first error is raised.
    """
    world_size = config.world_size
    results: list = [None] * world_size
    errors: dict[int, BaseException] = {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    if not hasattr(ThreadLocalWorld, "comms"):
        # torch 2.11 asks its own in-memory world for this list when it leaves
        ThreadLocalWorld.comms = property(lambda world: [])
    store, messages = dist.HashStore(), ThreadMessages()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
            # Each backward runs in its own thread's engine, so that collectives inside it stay on this rank.
            torch.autograd.set_multithreading_enabled(False)
            context = ParallelContext.within(config, rank, dtype=dtype, seed=seed, make_links=messages.make_links)
            results[rank] = function(context)
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            errors[rank] = error
            messages.close()
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout=300)
            assert not thread.is_alive(), f"rank {rank} of {world_size} still runs after 300 s: deadlock"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        # A rank that others abandoned reports that; the one that failed first by itself is the cause.
        raise next(iter(errors.values()))
    assert not messages.unread(), f"sent and never received: {messages.unread()}"
    return results


@cache
def _pool() -> Pool:
    return start_pool()


@cache
def _gpu_pool(num_gpus: int) -> Pool:
    return start_pool()


def on_processes(
    config: ParallelConfig,
    function: Callable[..., Result],
    *arguments: Any,
    dtype: torch.dtype = torch.float64,
    seed: int = 1234,
    timeout: float = 300.0,
) -> list[Result]:
    """Runs `function(context, *arguments)` on `spec.world_size` gloo processes; the results by rank.

    The processes are started once per test session and wait between jobs; every job gets a process group of its own.
    `function` must stand at the top of an importable module; arguments and results must be picklable. Raises
    `RankFailure` with the first failing rank's trace, or with every rank's stacks after `timeout` seconds.
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
    """The same as `on_processes` on one GPU per rank. All jobs of so many ranks share one NCCL process group, and their
    contexts share its communicators, until one fails."""
    pool = _gpu_pool(config.world_size)
    return pool.run(config, function, arguments, dtype=dtype, seed=seed, timeout=timeout, on_gpu=True)


def run_program(
    arguments: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs `python pretrain_moe.py arguments` in a process of its own."""
    return _run([sys.executable, str(REPOSITORY / "pretrain_moe.py"), *arguments], cwd, env)


def run_torchrun(num_ranks: int, arguments: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess:
    """Runs `pretrain_moe.py arguments` on `num_ranks` gloo processes under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return _run([*launcher, str(REPOSITORY / "pretrain_moe.py"), *arguments], cwd, None)


def _run(command: list[str], cwd: Path, env: dict[str, str] | None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
