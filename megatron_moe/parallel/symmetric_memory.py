"""Symmetric memory: one buffer per rank of a group, which every rank of the group can read and write.

On GPUs of one NVLink host the buffers are those of `torch.distributed._symmetric_memory` (peer-to-peer mappings, no
multicast). CPU ranks of one host map files in shared memory.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext, ProcessGroup

SHARED_FOLDER = Path("/dev/shm")
_PREFIX = "megatron_moe_"


def allocate_symmetric(
    num_bytes: int, group: ProcessGroup, ctx: ParallelContext, *, purpose: str, alternative: str
) -> tuple[Tensor, ...]:
    """Allocates `num_bytes` zeros on every rank of the group: uint8 [num_bytes] per rank, in group order.

    Collective over the group. The buffers live as long as the tensors. `purpose` and `alternative`: what the memory is
    for, as in "exchange tokens", and flags that avoid it, for the message of an error.
    """
    if is_emulated(group, ctx):
        return (torch.zeros(num_bytes, dtype=torch.uint8, device=ctx.device),) * group.size
    if ctx.device.type == "cuda":
        return _from_torch(num_bytes, group, ctx.device)
    try:
        return _from_files(num_bytes, group)
    except _FileProblem as problem:
        raise EnvironmentProblem(
            f"rank {problem.rank} cannot {purpose} through {SHARED_FOLDER}: {problem}; provide the same folder to all "
            f"ranks of the host with enough space (docker run --shm-size or --ipc host), or use {alternative}"
        ) from None


def is_emulated(group: ProcessGroup, ctx: ParallelContext) -> bool:
    """True if the other ranks of the group do not exist, as in memory emulation and kernel warm-up. All buffers of
    `allocate_symmetric` are then the same memory."""
    return ctx.device.type == "meta" or (group.handle is not None and dist.get_backend(group.handle) == "fake")


def has_peer_access(group: ProcessGroup, ctx: ParallelContext) -> bool:
    """False if two GPUs of the group, which are on one host, cannot access each other's memory. True if this process
    does not see the GPUs of the other ranks, or if they do not exist."""
    on_host = ctx.process.local_world_size
    if ctx.device.type != "cuda" or is_emulated(group, ctx) or torch.cuda.device_count() < on_host:
        return True
    devices = [rank % on_host for rank in group.ranks]
    return all(a == b or torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices)


def leading_view(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """First bytes of a buffer, uint8 [num_bytes], as a tensor."""
    size = prod(shape) * dtype.itemsize
    assert size <= len(buffer), f"a tensor of {size} bytes exceeds its buffer of {len(buffer)} bytes"
    return buffer[:size].view(dtype).view(shape)


def _from_torch(num_bytes: int, group: ProcessGroup, device: torch.device) -> tuple[Tensor, ...]:
    assert group.handle is not None, f"symmetric memory needs a group of several ranks, not {group.size}"
    # not `symm_mem.empty`, because it imports sympy, which takes more than a second
    own = symm_mem._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    own.zero_()
    handle = symm_mem.rendezvous(own, group.handle)
    # barrier, because no rank may write to a buffer before its owner has cleared it
    torch.cuda.synchronize(device)
    dist.barrier(group.handle, device_ids=[device.index])
    return tuple(
        own if rank == group.rank else handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size)
    )


class _FileProblem(Exception):
    """Reason why `rank` cannot share a file with the other ranks."""

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


def _from_files(num_bytes: int, group: ProcessGroup) -> tuple[Tensor, ...]:
    """Maps a file of every rank. Raises _FileProblem, on all ranks, if one cannot create or find a file."""
    remove_stale_files()
    handle, name, problem = -1, "", ""
    try:
        handle, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=SHARED_FOLDER)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.posix_fallocate(handle, 0, num_bytes)  # writing to a page without memory would kill the process with SIGBUS
    except OSError as error:
        problem = f"{error.strerror} for {num_bytes:,} bytes"
    try:
        names, problems = zip(*gather_objects((name, problem), group), strict=True)
        _raise_first(problems, group)
        unseen = next((rank for rank, each in zip(group.ranks, names, strict=True) if not os.path.exists(each)), None)
        _raise_first(
            gather_objects("" if unseen is None else f"the file of rank {unseen} does not exist", group), group
        )
        parts = tuple(torch.from_file(each, shared=True, size=num_bytes, dtype=torch.uint8) for each in names)
        gather_objects(None, group)  # barrier: every rank has mapped every file
    finally:
        if name:
            os.unlink(name)
            os.close(handle)
    return parts


def _raise_first(problems: Sequence[str], group: ProcessGroup) -> None:
    """Raises _FileProblem for the first problem of a rank, if there is one."""
    for rank, problem in zip(group.ranks, problems, strict=True):
        if problem:
            raise _FileProblem(problem, rank)


def remove_stale_files() -> None:
    """Removes files of processes that were killed before they could remove them. A living process holds a lock."""
    for path in SHARED_FOLDER.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            process = int(path.name[len(_PREFIX) :].partition("_")[0])
            if path.is_symlink() or path.stat().st_uid != os.getuid() or Path(f"/proc/{process}").exists():
                continue
            with open(path, "rb") as file:
                # /proc does not show processes of other PID namespaces, so a lock is used
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
