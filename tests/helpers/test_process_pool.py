"""Process pool: results, and reports of ranks that fail, die or hang."""

import multiprocessing
import os
import pickle
import signal
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.collectives import all_reduce_, gather_objects
from tests.helpers.process_pool import RankFailure, _values, free_port
from tests.helpers.rank_worker import Answer
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import EXACT

PAIR = ParallelConfig(world_size=2, tp=2)


def sums_and_process(context, addend):
    total = all_reduce_(torch.full((2,), float(context.rank + addend)), context.group("tp"))
    return total, os.getpid()


def fail_on_rank_1(context):
    if context.rank == 1:
        raise ValueError("the reason")
    all_reduce_(torch.zeros(1), context.group("tp"))


def die_on_rank_1(context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce_(torch.zeros(1), context.group("tp"))


def hang_on_rank_0(context):
    if context.rank == 0:
        threading.Event().wait()
    return context.rank


def workers_with_answers(*answers):
    """Stand-ins for workers whose answers have already arrived; None: no answer."""
    ends = [multiprocessing.Pipe() for _ in answers]
    for (_, theirs), answer in zip(ends, answers, strict=True):
        if answer is not None:
            theirs.send_bytes(pickle.dumps(answer))
    return [SimpleNamespace(pipe=ours, stack=lambda: "its stack", theirs=theirs) for ours, theirs in ends]


def test_results_are_ordered_by_rank_and_processes_are_reused():
    first = on_processes(PAIR, sums_and_process, 1)
    second = on_processes(PAIR, sums_and_process, 2)
    for total, _ in first:
        EXACT.check(total, [3.0, 3.0])
    for total, _ in second:
        EXACT.check(total, [5.0, 5.0])
    processes = [process for _, process in first]
    assert len(set(processes)) == 2 and processes == [process for _, process in second]


def test_groups_of_processes_are_those_of_threads():
    config = ParallelConfig(world_size=4, tp=2)
    assert on_processes(config, groups_of) == on_threads(config, groups_of)


def groups_of(context):
    return {name: gather_objects(context.rank, context.group(name)) for name in ("tp", "dp", "world")}


def test_the_trace_of_the_first_failed_rank_is_reported():
    with pytest.raises(
        RankFailure, match=r"rank 1 of 2 failed first:[\s\S]*fail_on_rank_1[\s\S]*ValueError: the reason"
    ):
        on_processes(PAIR, fail_on_rank_1)
    assert len(on_processes(PAIR, sums_and_process, 1)) == 2, "the pool must work again"


def test_a_rank_that_dies_fails_the_test():
    with pytest.raises(RankFailure, match="died with exit code -9"):
        on_processes(PAIR, die_on_rank_1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_with_its_stack():
    # on a busy machine the other rank may time out too
    with pytest.raises(RankFailure, match=r"ranks \[0(, 1)?\] of 2 still ran after 1.5 s[\s\S]*hang_on_rank_0"):
        on_processes(PAIR, hang_on_rank_0, timeout=1.5)
    assert len(on_processes(PAIR, sums_and_process, 1)) == 2, "the pool must work again"


def test_only_ranks_that_hang_are_named():
    with pytest.raises(RankFailure, match=r"ranks \[0\] of 2 still ran after 0.2 s[\s\S]*its stack"):
        _values(workers_with_answers(None, Answer(1)), 0.2)


def test_answers_that_arrived_before_the_deadline_count_after_it():
    assert _values(workers_with_answers(Answer(1), Answer(2)), -1.0) == [1, 2]


def test_the_earliest_error_is_reported_first():
    """An abandoned rank may be read before the rank that failed."""
    late, early = Answer(trace="abandoned", time=2.0), Answer(trace="the reason", time=1.0)
    with pytest.raises(RankFailure, match="rank 1 of 2 failed first:\nthe reason\nrank 0: abandoned"):
        _values(workers_with_answers(late, early), 1.0)


@pytest.mark.parametrize("among", [(0,), range(20000, 30000)])
def test_a_free_port_is_reserved_for_a_server(among):
    """Other sessions cannot get the port before the server starts."""
    port = free_port(among)
    assert port in among or among == (0,)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "")):
        with socket.socket(family) as other, pytest.raises(OSError):
            other.bind((host, port))
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert free_port(among) != port
    with pytest.raises(OSError, match="no port is free"):
        free_port([port])
