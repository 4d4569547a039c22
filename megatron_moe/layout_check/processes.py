"""Runs the ranks of a layout as gloo processes on this host and collects their records."""

import pickle
import socket
import time
import warnings
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from megatron_moe import build
from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.fault_seeds import FaultSeed
from megatron_moe.layout_check.record import RankRecord, record_run
from megatron_moe.layout_check.samples import random_datasets


class RankFailure(RunError):
    """A rank raised an error, died or timed out."""

    code = ExitCode.OTHER_RANK


class Ranks:
    """Processes that run a plan; started by the constructor."""

    def __init__(self, plan: RunPlan, *, num_steps: int, plant: FaultSeed | None) -> None:
        # A fork server imports everything once; ranks are forked from it in milliseconds, without shared threads.
        host = get_context("forkserver")
        host.set_forkserver_preload([__name__])
        self._port = _reserved_port()
        port = self._port.getsockname()[1]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(plan.parallel.world_size):
            launch = replace(plan.launch, rank=rank, local_rank=rank, master_addr="127.0.0.1", master_port=port)
            ours, theirs = host.Pipe(duplex=False)
            arguments = (theirs, replace(plan, launch=launch), num_steps, plant)
            process = host.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def records(self, timeout: float) -> list[RankRecord]:
        """Records by rank. Raises RankFailure when a rank ends early, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        found: dict[int, RankRecord] = {}
        try:
            while len(found) < len(self._pipes):
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(len(self._pipes))) - set(found))
                    raise RankFailure(f"ranks {missing} still ran after {timeout:g} s, perhaps in a deadlock")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = self._pipes.index(pipe)
                    found[rank] = _received(rank, pipe)
        finally:
            self._end()
        return [found[rank] for rank in range(len(self._pipes))]

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._port.close()


def _received(rank: int, pipe: Connection) -> RankRecord:
    try:
        record = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailure(f"rank {rank} ended before its last step; see its error above") from None
    assert isinstance(record, RankRecord), f"rank {rank} sent {type(record)}"
    return record


def _run_rank(pipe: Connection, plan: RunPlan, num_steps: int, plant: FaultSeed | None) -> None:
    """Process main of one rank: sends its record. Errors are printed to the shared stderr."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about renamed collectives once per rank
    context = build.build_context(plan)
    datasets = random_datasets(plan, num_steps=num_steps)
    kernels = build.build_kernels(plan, context)
    record = record_run(plan, context, kernels, datasets, num_steps=num_steps, prepare=plant)
    pipe.send_bytes(pickle.dumps(record))
    context.stop()


def _reserved_port() -> socket.socket:
    """Reserves a port until a rank listens on it: a bound socket that does not listen keeps other programs away, but
    not
    a server with SO_REUSEADDR such as torch's."""
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
