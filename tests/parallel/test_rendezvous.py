"""Ranks that do not meet."""

import socket

import pytest

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import EnvironmentProblem, ExitCode
from megatron_moe.specs.parallel import Launch, ParallelSpec
from tests.ranks import free_port


def refused(rank: int, port: int) -> EnvironmentProblem:
    launch = Launch(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
    with pytest.raises(EnvironmentProblem) as problem:
        ParallelContext.start(ParallelSpec(world_size=2, timeout_minutes=0.02), launch, device="cpu")
    return problem.value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_comes_is_told_with_place_and_time(rank: int) -> None:
    """Fault 37: code 3."""
    port = free_port()
    problem = refused(rank, port)
    assert problem.code == ExitCode.ENVIRONMENT
    assert f"rank {rank} of 2 could not meet the others at 127.0.0.1:{port} within 0.02 minutes" in str(problem)


def test_a_port_in_use_is_told() -> None:
    """Fault 37."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in str(refused(0, port))
