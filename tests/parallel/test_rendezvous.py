"""Failures of the rendezvous, and timeouts of collectives."""

import re
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_moe.config.exit_codes import ExitCode, OtherRankProblem
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.peer_failure import is_broken_connection
from tests.helpers.process_pool import free_port
from tests.helpers.ranks import on_processes


def refused(rank: int, port: int, start_id: str = "") -> OtherRankProblem:
    launch = ProcessInfo(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port, start_id=start_id
    )
    with pytest.raises(OtherRankProblem) as problem:
        ParallelContext.start(ParallelConfig(world_size=2, distributed_timeout_minutes=0.02), launch, device="cpu")
    assert problem.value.code == ExitCode.RENDEZVOUS
    return problem.value


def test_a_rank_that_never_connects_is_reported_with_address_and_time() -> None:
    port = free_port()
    problem = refused(0, port)
    assert problem.rank == 1
    assert f"1 of 2 ranks did not connect to 127.0.0.1:{port} within 0.02 minutes: rank 1" in str(problem)


def test_a_first_rank_that_never_connects_is_reported_with_address_and_time() -> None:
    port = free_port()
    said = str(refused(1, port))
    assert re.search(rf"could not connect to the other ranks at 127.0.0.1:{port} and gave up after [1-9] s: ", said)


def test_a_port_in_use_is_reported() -> None:
    """The exit code is that of a rendezvous problem (13), because the port may be free at the next launch."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} and gave up after 0 s: " in str(refused(0, port))


def test_ranks_of_an_earlier_start_are_not_met(monkeypatch) -> None:
    """Ranks of a killed launch may connect to the store of the next torchrun on the same port and must be ignored."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for start_id in ("", "earlier"):
        dist.PrefixStore(start_id, server).set("rank 1 connected", "")
    assert "1 of 2 ranks did not connect" in str(refused(0, server.port, start_id="now"))
    with pytest.raises(dist.DistError):
        server.wait(["earlier/all ranks connected"], timedelta(seconds=0.1))


def wait_for_absent_peer(context: ParallelContext) -> str:
    """Returns, on the first of two ranks, the error of an all-reduce that the second rank never joins."""
    group, store = context.group("dp"), distributed_c10d._get_default_store()
    all_reduce_(torch.ones(1), group)
    context.set_timeout(1.0)
    if context.rank == 1:
        store.get("the first rank has given up")
        return ""
    with pytest.raises(RuntimeError) as problem:
        all_reduce_(torch.ones(1), group)
    store.set("the first rank has given up", "")
    return str(problem.value)


def stopped_peer(pooled: ParallelContext, port: int) -> str:
    """Returns, on the first of two ranks, the error of an all-reduce that exceeds --distributed-timeout-minutes."""
    rank = pooled.rank
    dist.destroy_process_group()
    launch = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
    context = ParallelContext.start(ParallelConfig(world_size=2, distributed_timeout_minutes=0.1), launch, device="cpu")
    store, said = distributed_c10d._get_default_store(), ""
    if rank == 1:
        store.wait(["the first rank has given up"], timedelta(seconds=100))
    else:
        with pytest.raises(RuntimeError) as problem:
            all_reduce_(torch.ones(1), context.group("world"))
        store.set("the first rank has given up", "")
        said = str(problem.value)
    context.stop()
    return said


def test_the_timeout_applies_to_all_groups() -> None:
    """The timeout applies to the world group, too, so a rank that hangs in a save is detected within it."""
    said, _ = on_processes(ParallelConfig(world_size=2), stopped_peer, free_port())
    assert is_broken_connection(RuntimeError(said)) and "6000ms" in said


def disagree(pooled: ParallelContext, port: int) -> str:
    """Returns a rank's error if two ranks call all-reduce on tensors of different shapes."""
    rank = pooled.rank
    dist.destroy_process_group()
    launch = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
    context = ParallelContext.start(ParallelConfig(world_size=2, debug_collectives=True), launch, device="cpu")
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = context.group("dp")
    assert all_reduce_(torch.ones(3), group).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError) as problem:
        all_reduce_(torch.ones(rank + 1, 7), group)
    context.stop()
    return str(problem.value)


def groups_of_hosts(pooled: ParallelContext, port: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a rank's groups within and between hosts if launchers report different numbers of ranks per host."""
    rank = pooled.rank
    dist.destroy_process_group()
    host, local_world_size = rank // 2, (2, 1)[rank // 2]
    launch = ProcessInfo(
        rank=rank, world_size=3, local_rank=rank - 2 * host, local_world_size=local_world_size, master_port=port
    )
    config = ParallelConfig(world_size=3, ep=3, ranks_per_host=local_world_size)
    context = ParallelContext.start(config, launch, device="cpu")
    found = context.group("etp_ep_intra").ranks, context.group("etp_ep_inter").ranks
    context.stop()
    return found


def test_all_ranks_use_the_ranks_per_host_of_the_first() -> None:
    """Hosts of 2 ranks and 1 rank cannot form groups of ranks with equal index, so every rank counts as a host."""
    found = on_processes(ParallelConfig(world_size=3), groups_of_hosts, free_port())
    assert found == [((rank,), (0, 1, 2)) for rank in range(3)]


def test_ranks_that_disagree_about_a_collective_report_what_each_was_about_to_do() -> None:
    """`--debug-collectives` compares the calls of all ranks, and the error contains each rank's own call."""
    for rank, said in enumerate(on_processes(ParallelConfig(world_size=2), disagree, free_port())):
        own = rf"Rank {rank} is running collective: .*OpType=ALLREDUCE, TensorShape=\[{rank + 1}, 7\]"
        assert re.search(own, said), said
        assert not is_broken_connection(RuntimeError(said))


def test_the_timeout_of_collectives_can_be_changed_later() -> None:
    said, _ = on_processes(ParallelConfig(world_size=2), wait_for_absent_peer)
    assert is_broken_connection(RuntimeError(said)) and "1000ms" in said
