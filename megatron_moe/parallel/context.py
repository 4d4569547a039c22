"""Process groups, device, parameter dtype and seed of one rank.

`pretrain_moe.py` creates one context per run and passes it down. No context is global, so several ranks can be threads
of one process.
"""

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, OtherRankProblem
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.config.precision import FloatName
from megatron_moe.parallel.grid import all_groups

_MAX_NAMED = 16
_ALL_CONNECTED = "all ranks connected"
"""Key of the rendezvous store. Its value is the number of ranks on the host of rank 0."""
_DTYPES: tuple[tuple[FloatName, torch.dtype], ...] = (
    ("fp64", torch.float64),
    ("fp32", torch.float32),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
)


def torch_dtype(name: FloatName) -> torch.dtype:
    return dict(_DTYPES)[name]


def float_name(dtype: torch.dtype) -> FloatName:
    """Name of a torch dtype, e.g. "bf16"; inverse of `torch_dtype`."""
    return next(name for name, each in _DTYPES if each == dtype)


@dataclass(frozen=True)
class ProcessGroup:
    """Process group that contains this rank. The coordinates of its ranks differ only on the group's own grid axes."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """Index of this rank in `ranks`."""
    handle: dist.ProcessGroup | None
    """torch.distributed process group; None if this rank is the only member."""
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)


Handles = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
"""Communicators by (ranks, purpose). Groups with the same ranks and purpose share a communicator."""


@dataclass(eq=False, repr=False)
class ParallelContext:
    """Process groups of the attention and expert grids, device, parameter dtype and seed of this rank.

    Construction is collective: every rank takes part in creating every group, in the same order.
    """

    config: ParallelConfig
    process: ProcessInfo
    device: torch.device
    dtype: torch.dtype
    seed: int
    handles: Handles = field(default_factory=dict)
    owns_process_group: bool = False
    """True if `stop` destroys torch's default process group."""
    is_fake: bool = False
    """True if the other ranks do not exist: only this rank's groups are created, and collectives transfer nothing."""
    make_links: Callable[["ParallelContext"], Any] | None = None
    """Creates the pipeline links if ranks are threads; None selects `p2p.Links`, which uses torch.distributed."""

    def __post_init__(self) -> None:
        self.config = replace(self.config, world_size=self.process.world_size)
        self.timeout_s = 60 * self.config.distributed_timeout_minutes
        self._before_stop: list[Callable[[], None]] = []
        self._groups: dict[str, ProcessGroup] = {}
        for name, lists in all_groups(self.config).items():
            for ranks in lists:
                if self.is_fake and self.rank not in ranks:
                    continue
                handle = self.communicator(ranks, "collectives") if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._groups[name] = ProcessGroup(name, ranks, ranks.index(self.rank), handle, self.device)

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes shared files and prints the log."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True on the last rank, which reports losses, as in Megatron."""
        return self.rank == self.process.world_size - 1

    def group(self, name: str) -> ProcessGroup:
        """Group of this rank by name, e.g. "tp", "dp_cp" or "ep"; `grid.all_groups` lists all names."""
        return self._groups[name]

    def host_group(self) -> ProcessGroup:
        """World group with the Gloo backend, for small host tensors; its collectives do not synchronise with the
        device. The first call is collective over the world."""
        world = self.group("world")
        if world.size == 1 or self.device.type != "cuda":
            return world
        key = (world.ranks, "host")
        if key not in self.handles:
            timeout = timedelta(seconds=self.timeout_s)
            self.handles[key] = dist.new_group(list(world.ranks), backend="gloo", timeout=timeout)
        return replace(world, name="host", handle=self.handles[key], device=torch.device("cpu"))

    def communicator(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """Communicator of `ranks` for one purpose, created by the first call. Every rank of the world must call it with
        the same arguments in the same order; a rank that is not in `ranks` cannot use the result."""
        if (ranks, purpose) not in self.handles:
            # without a timeout, torch would use its default of up to 30 minutes instead of the timeout of the world
            # group
            self.handles[ranks, purpose] = dist.new_group(list(ranks), timedelta(seconds=self.timeout_s))
        return self.handles[ranks, purpose]

    @classmethod
    def start(
        cls,
        config: ParallelConfig,
        launch: ProcessInfo,
        *,
        device: str = "auto",
        dtype: FloatName = "fp32",
        seed: int = 1234,
    ) -> "ParallelContext":
        """Selects the device ("auto": this rank's GPU if there is one), waits for the other ranks and creates the
        groups. `dtype`: that of the parameters. Raises EnvironmentProblem or OtherRankProblem."""
        selected = _select_device(device, launch)
        if launch.world_size > 1:
            ranks_per_host = _rendezvous(config, launch, selected)
            if config.ranks_per_host is not None:  # all ranks must create the same groups
                config = replace(config, ranks_per_host=ranks_per_host)
        return cls(config, launch, selected, torch_dtype(dtype), seed, owns_process_group=launch.world_size > 1)

    @classmethod
    def single(
        cls, *, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu", seed: int = 1234
    ) -> "ParallelContext":
        """Context of a single rank without torch.distributed, for tests and tools."""
        return cls(ParallelConfig(), ProcessInfo(), torch.device(device), dtype, seed)

    @classmethod
    def fake(
        cls,
        config: ParallelConfig,
        rank: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "meta",
    ) -> "ParallelContext":
        """Context of `rank` in a world of `config.world_size` ranks that do not exist, on torch's "fake" backend.

        Shapes, groups and memory are as in a real run; gathered tensors contain copies of this rank's shard. A process
        emulates one rank at a time: call `stop` before the next one.
        """
        assert not dist.is_initialized(), (
            "this process already belongs to a process group; call `stop` on its context first"
        )
        has_meta = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")
        if torch.device(device).type == "meta" and not has_meta:
            # for older torch versions; imported late, because it imports torch's compiler (seconds)
            importlib.import_module("torch.distributed._tools.fake_collectives")

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
        on_host = config.ranks_per_host or config.world_size
        launch = ProcessInfo(
            rank=rank, world_size=config.world_size, local_rank=rank % on_host, local_world_size=on_host
        )
        return cls(config, launch, torch.device(device), dtype, 1234, owns_process_group=True, is_fake=True)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the timeout of later collectives of all groups."""
        self.timeout_s = timeout_s
        for handle in dict.fromkeys(self.handles.values()):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), handle)

    def before_stop(self, call: Callable[[], None]) -> None:
        """Registers a function that `stop` calls before it destroys the communicators."""
        self._before_stop.append(call)

    def stop(self) -> None:
        """Calls the functions that `before_stop` registered, the newest first, and destroys torch's process group if
        this context created it. The context cannot be used afterwards."""
        while self._before_stop:
            self._before_stop.pop()()
        if self.owns_process_group:
            dist.destroy_process_group()

    def __str__(self) -> str:
        config = self.config
        return (
            f"using world size: {config.world_size}, data-parallel size: {config.dp}, "
            f"context-parallel size: {config.cp}, "
            f"tensor-model-parallel size: {config.tp}, pipeline-model-parallel size: {config.pp}, "
            f"expert-model-parallel size: {config.ep}, device: {self.device}, parameters: {self.dtype}"
        )


def _select_device(requested: str, launch: ProcessInfo) -> torch.device:
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise EnvironmentProblem("--device cuda: torch finds no CUDA device; use --device cpu")
    if requested == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise EnvironmentProblem(
            f"local rank {launch.local_rank} has no GPU: this host has {count}; start at most {count} processes on it"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _rendezvous(config: ParallelConfig, launch: ProcessInfo, device: torch.device) -> int:
    """Creates the default process group. Returns the number of ranks on the host of rank 0."""
    if launch.master_addr in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if config.debug_collectives:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    begin = time.monotonic()
    try:
        store = _rendezvous_store(config, launch)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(minutes=config.distributed_timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
        return int(store.get(_ALL_CONNECTED))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise OtherRankProblem(
            f"rank {launch.rank} of {launch.world_size} could not connect to the other ranks at "
            f"{launch.master_addr}:{launch.master_port} and gave up after {time.monotonic() - begin:.0f} s: "
            f"{error}; check that all ranks were started with the same master address and that the port is free",
            code=ExitCode.RENDEZVOUS,
        ) from error


def _rendezvous_store(config: ParallelConfig, launch: ProcessInfo) -> dist.Store:
    """Connects to the TCP store of the process group and returns it once all ranks have connected.

    The store's server runs in torchrun's agent if there is one, else on rank 0. Rank 0 waits for the other ranks in
    this function, because the store's constructor cannot report missing ranks, and then signals the others to continue.

    Raises:
        OtherRankProblem: on rank 0, if ranks are missing at the timeout. The other ranks raise torch's errors.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    is_server = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = launch.master_addr, launch.master_port
    server = dist.TCPStore(address, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=is_server)
    # torchrun's store may be shared with an earlier attempt, or with ranks whose own launcher died
    store = dist.PrefixStore(launch.start_id, server)
    keys = [f"rank {rank} connected" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], "")
    if launch.rank != 0:
        store.wait([_ALL_CONNECTED], timeout)
        return store
    try:
        store.wait(keys, timeout)
    except dist.DistError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(map(str, missing[:_MAX_NAMED])) + " ..." * (len(missing) > _MAX_NAMED)
        raise OtherRankProblem(
            f"{len(missing)} of {launch.world_size} ranks did not connect to {address}:{port} within "
            f"{config.distributed_timeout_minutes:g} minutes: rank {named}; see the output of these ranks, and check "
            "that all ranks were started with the same master address",
            missing[0] if missing else None,
            ExitCode.RENDEZVOUS,
        ) from error
    store.set(_ALL_CONNECTED, f"{launch.local_world_size}")
    return store
