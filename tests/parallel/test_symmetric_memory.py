"""Shared-memory files through which CPU ranks exchange tokens: reserved space, folder and removal."""

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel import symmetric_memory
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.peer_reduce import PeerReduce
from megatron_moe.parallel.sequence_shards import PeerShards
from megatron_moe.parallel.shared_shards import SharedRegion
from megatron_moe.parallel.symmetric_memory import allocate_symmetric, remove_stale_files
from tests.helpers.ranks import on_threads

RANKS = ParallelConfig(world_size=2, ep=2)


def shards_of(axis: str, ctx: ParallelContext) -> PeerShards:
    return PeerShards(1024, ctx, reference.sum_contributions_, axis)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(symmetric_memory, "SHARED_FOLDER", tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def allocation(ctx: ParallelContext) -> str:
    """Allocates symmetric memory; returns the error message, or "" if the buffers of both ranks are mapped."""
    try:
        parts = allocate_symmetric(1000, ctx.group("etp_ep"), ctx, purpose="exchange tokens", alternative="--flag")
    except EnvironmentProblem as problem:
        assert problem.code == ExitCode.ENVIRONMENT
        return str(problem)
    assert [len(part) for part in parts] == [1000, 1000]
    return ""


def test_every_rank_maps_the_files_of_all_ranks(folder: Path) -> None:
    assert on_threads(RANKS, allocation) == ["", ""]


def test_a_full_folder_is_a_problem_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, caller = os.posix_fallocate, threading.local()

    def full(handle: int, start: int, size: int) -> None:
        if caller.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(handle, start, size)

    def rank(ctx: ParallelContext) -> str:
        caller.rank = ctx.rank
        return allocation(ctx)

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = on_threads(RANKS, rank)
    assert found[0] == found[1]
    assert found[0].startswith(
        f"rank 1 cannot exchange tokens through {folder}: No space left on device for 1,000 bytes"
    )
    assert found[0].endswith("with enough space (docker run --shm-size or --ipc host), or use --flag")


@pytest.mark.parametrize(
    ("allocate", "purpose", "flags"),
    [
        (lambda group, ctx: SharedRegion(4096, group, ctx), "gather weights", "--fsdp-gather-backend nccl"),
        (lambda group, ctx: PeerReduce(4096, group, ctx), "reduce gradients", "--fsdp-reduce-backend nccl"),
        (lambda _, ctx: shards_of("tp", ctx), "overlap tensor-parallel communication", "--no-tp-comm-overlap"),
        (
            lambda _, ctx: shards_of("cp", ctx),
            "gather keys and values",
            "--cp-comm-type a2a (sparse and compressed attention always gather: --context-parallel-size 1)",
        ),
    ],
    ids=["gathers", "reductions", "tp", "cp"],
)
def test_the_remedy_for_a_full_folder_is_that_of_its_user(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    allocate: Callable[[ProcessGroup, ParallelContext], object],
    purpose: str,
    flags: str,
    request: pytest.FixtureRequest,
) -> None:
    axis = request.node.callspec.id
    ranks = ParallelConfig(world_size=2, **{axis: 2}) if axis in ("tp", "cp") else RANKS

    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rank(ctx: ParallelContext) -> str:
        with pytest.raises(EnvironmentProblem) as problem:
            allocate(ctx.group("etp_ep"), ctx)
        return str(problem.value)

    monkeypatch.setattr(os, "posix_fallocate", full)
    for message in on_threads(ranks, rank):
        assert message.startswith(f"rank 0 cannot {purpose} through {folder}: ") and message.endswith(f"use {flags}")


def test_space_is_reserved_before_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(
        os, "posix_fallocate", lambda handle, start, size: reserved.append(size) or os.ftruncate(handle, size)
    )
    assert on_threads(RANKS, allocation) == ["", ""] and reserved == [1000, 1000]


def test_a_folder_that_cannot_be_written_is_a_problem_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_memory, "SHARED_FOLDER", tmp_path / "none")
    found = on_threads(RANKS, allocation)
    assert found[0] == found[1] and found[0].startswith(
        f"rank 0 cannot exchange tokens through {tmp_path}/none: No such"
    )


def test_ranks_that_see_different_folders_find_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, exists = threading.local(), os.path.exists
    own = threading.local()
    create = symmetric_memory.tempfile.mkstemp

    def remember(**options: object) -> tuple[int, str]:
        handle, own.name = create(**options)
        return handle, own.name

    monkeypatch.setattr(symmetric_memory.tempfile, "mkstemp", remember)
    monkeypatch.setattr(os.path, "exists", lambda path: exists(path) and (caller.rank == 0 or path == own.name))

    def rank(ctx: ParallelContext) -> str:
        caller.rank = ctx.rank
        return allocation(ctx)

    found = on_threads(RANKS, rank)
    assert found[0] == found[1]
    assert found[0].startswith(f"rank 1 cannot exchange tokens through {folder}: the file of rank 0 does not exist")


def test_files_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "SHARED_FOLDER", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {f"megatron_moe_{dead.pid}_a", f"megatron_moe_{dead.pid}_held"}
    kept = {f"megatron_moe_{os.getpid()}_b", "megatron_moe_other", "another", f"megatron_moe_{dead.pid}_link"}
    for name in names | kept:
        (tmp_path / name).touch()
    (tmp_path / f"megatron_moe_{dead.pid}_link").unlink()
    (tmp_path / f"megatron_moe_{dead.pid}_link").symlink_to(tmp_path / "another")
    with open(tmp_path / f"megatron_moe_{dead.pid}_held") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_stale_files()
        assert {path.name for path in tmp_path.iterdir()} == kept | {f"megatron_moe_{dead.pid}_held"}
    assert on_threads(RANKS, allocation) == ["", ""]
    assert {path.name for path in tmp_path.iterdir()} == kept
