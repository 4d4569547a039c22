"""Verifies a layout against a single-rank run in double precision, with one process per rank on this host."""

import pickle
import socket
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from megatron_moe import build
from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.imports import import_file
from megatron_moe.config.model import with_experts
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.injected_errors import InjectedError
from megatron_moe.layout_check.oracle import record_oracle
from megatron_moe.layout_check.record import RankRecord, record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.layout_check.table import Comparison, compare_runs
from megatron_moe.parallel.context import ParallelContext


class RankFailure(RunError):
    """Raised if a rank's process ends before it has sent its record, or does not send it in time."""

    code = ExitCode.OTHER_RANK


def verify_layout(
    plan: RunPlan, *, num_steps: int, timeout: float, injected_error: InjectedError | None = None
) -> Comparison:
    """Trains `num_steps` steps on all ranks of the plan and in a single-rank run, and compares the results.

    Args:
        plan: plan in double precision; its rank and master address are replaced for every process.
        timeout: maximum time, in seconds, that the ranks may run after the single-rank run has finished.
        injected_error: error to inject into the ranks, but not into the single-rank run.

    Raises:
        RankFailure: a rank ended early or timed out.
    """
    plan = _without_forced_logits(plan)
    ranks = RankProcesses(plan, num_steps=num_steps, injected_error=injected_error)
    torch.set_num_threads(1)
    context = ParallelContext.single(seed=plan.loop.seed)
    kernels, datasets = build.build_kernels(plan, context), random_datasets(plan, num_steps=num_steps)
    oracle = record_oracle(plan, context, kernels, datasets, num_steps=num_steps)
    return compare_runs(oracle, ranks.records(timeout))


def _without_forced_logits(plan: RunPlan) -> RunPlan:
    """Plan without forced router logits, which would bypass the router and differ between context-parallel ranks, and
    without recorded expert choices, which do not fit the reduced model."""

    def without_forcing(moe: MoEConfig) -> MoEConfig:
        return replace(moe, router=replace(moe.router, force_balancing=False, force_biased=None, force_skew=None))

    loop = replace(plan.loop, moe_routing_replay_path=None)
    return replace(plan, model=with_experts(plan.model, without_forcing), loop=loop)


class RankProcesses:
    """One process on this host for each rank of a plan; the constructor starts them."""

    def __init__(self, plan: RunPlan, *, num_steps: int, injected_error: InjectedError | None) -> None:
        # A fork server imports all modules once; ranks are forked from it in milliseconds and inherit no threads.
        host = get_context("forkserver")
        host.set_forkserver_preload([__name__])
        self._port = _reserved_port()
        port = self._port.getsockname()[1]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(plan.parallel.world_size):
            launch = replace(plan.process, rank=rank, local_rank=rank, master_addr="127.0.0.1", master_port=port)
            receiver, sender = host.Pipe(duplex=False)
            # pickled here, because a rank imports the files that define the plan's components before it unpickles them
            arguments = (sender, plan.imports, pickle.dumps(replace(plan, process=launch)), num_steps, injected_error)
            process = host.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            self._processes.append(process)
            self._pipes.append(receiver)

    def records(self, timeout: float) -> list[RankRecord]:
        """Returns the records in rank order. Raises RankFailure if a rank ends early, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        found: dict[int, RankRecord] = {}
        try:
            while len(found) < len(self._pipes):
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = [self._pipes.index(pipe) for pipe in waiting]
                    raise RankFailure(f"ranks {missing} were still running after {timeout:g} s; possible deadlock")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = self._pipes.index(pipe)
                    found[rank] = _received(rank, pipe)
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            self._port.close()
        return [found[rank] for rank in range(len(self._pipes))]


def _received(rank: int, pipe: Connection) -> RankRecord:
    try:
        record = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailure(f"rank {rank} ended before its last step; see its error above") from None
    assert isinstance(record, RankRecord), f"rank {rank} sent a {type(record)} instead of its record"
    return record


def _run_rank(
    pipe: Connection, imports: tuple[str, ...], pickled: bytes, num_steps: int, injected_error: InjectedError | None
) -> None:
    """Main function of a rank's process: trains and sends the record through `pipe`. Errors are printed to stderr."""
    for name in imports:
        import_file(name)
    plan: RunPlan = pickle.loads(pickled)
    torch.set_num_threads(1)
    context = build.build_context(plan)
    datasets = random_datasets(plan, num_steps=num_steps)
    kernels = build.build_kernels(plan, context)
    record = record_run(plan, context, kernels, datasets, num_steps=num_steps, prepare=injected_error)
    pipe.send_bytes(pickle.dumps(record))
    context.stop()


def _reserved_port() -> socket.socket:
    """Returns a socket bound to a free port, so that the system gives the port to no other program. torch's server can
    still listen on the port: it sets SO_REUSEADDR, and the returned socket does not listen."""
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
