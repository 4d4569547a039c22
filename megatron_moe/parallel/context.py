"""ParallelContext: who this rank is, with whom it talks, and on which device it computes.

One context per run, created in `pretrain_moe.py` and handed to everything that needs it; there is no global one, so
several ranks can be threads of one process.
"""

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, OtherRankProblem
from megatron_moe.config.parallel import Launch, ParallelConfig
from megatron_moe.config.precision import FloatName
from megatron_moe.parallel.fake import enter_fake_world
from megatron_moe.parallel.grid import all_groups
from megatron_moe.parallel.mailbox import Mailbox

_MAX_NAMED = 16
_DTYPES = (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))


def torch_dtype(name: FloatName) -> torch.dtype:
    return dict(_DTYPES)[name]


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks this rank shares one axis (or several) with."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """Index of this rank in `ranks`."""
    handle: dist.ProcessGroup | None
    """None for a group of one."""
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)


Handles = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
"""(ranks, what they say to each other) -> their communicator. Equal rank lists share one for each purpose."""


class ParallelContext:
    """Groups of both grids, device, parameter dtype and seed of this rank."""

    def __init__(
        self,
        config: ParallelConfig,
        launch: Launch,
        groups: dict[str, ProcessGroup],
        handles: Handles,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        owns_process_group: bool = False,
    ) -> None:
        self.config = config
        self.launch = launch
        self.device = device
        self.dtype = dtype
        self.seed = seed
        self.mailbox: Mailbox | None = None
        """Carries point-to-point messages when ranks are threads; None: torch.distributed does."""
        self._groups = groups
        self._handles = handles
        self._owns_process_group = owns_process_group

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def is_first(self) -> bool:
        """This rank writes files and prints."""
        return self.launch.rank == 0

    @property
    def is_last(self) -> bool:
        """This rank reports losses: the last one, as in Megatron."""
        return self.launch.rank == self.launch.world_size - 1

    def group(self, name: str) -> ProcessGroup:
        """The group of this rank by name: tp, cp, dp, pp, dp_cp, tp_cp, tp_dp_cp of the attention grid; etp, ep, edp,
        etp_ep of the expert grid; embedding (the stages that hold a copy of it); world."""
        return self._groups[name]

    def host_group(self) -> ProcessGroup:
        """The world once more, for a few numbers in host memory: asking for them waits for no device. All ranks must
        ask for it together when it is first asked for."""
        world = self.group("world")
        if world.size == 1 or self.device.type != "cuda":
            return world
        key = (world.ranks, "host")
        if key not in self._handles:
            timeout = timedelta(minutes=self.config.distributed_timeout_minutes)
            self._handles[key] = dist.new_group(list(world.ranks), backend="gloo", timeout=timeout)
        return replace(world, name="host", handle=self._handles[key], device=torch.device("cpu"))

    def communicator(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """The ranks' communicator for one purpose, made when first asked for. Every rank of the world must ask for the
        same ones in the same order; a rank outside gets one that is of no use to it."""
        return _communicator(self._handles, ranks, purpose)

    @classmethod
    def start(
        cls,
        config: ParallelConfig,
        launch: Launch,
        *,
        device: str = "auto",
        dtype: FloatName = "fp32",
        seed: int = 1234,
    ) -> "ParallelContext":
        """Chooses the device, meets the other ranks and builds the groups."""
        chosen = _choose_device(device, launch)
        if launch.world_size > 1:
            _rendezvous(config, launch, chosen)
        return cls._build(config, launch, chosen, torch_dtype(dtype), seed, owns=launch.world_size > 1)

    @classmethod
    def single(
        cls, *, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu", seed: int = 1234
    ) -> "ParallelContext":
        """One rank without torch.distributed, for tests and tools."""
        return cls._build(ParallelConfig(), Launch(), torch.device(device), dtype, seed, owns=False)

    @classmethod
    def within(
        cls,
        config: ParallelConfig,
        rank: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
        seed: int = 1234,
        mailbox: Mailbox | None = None,
        handles: Handles | None = None,
    ) -> "ParallelContext":
        """A rank of a process group that stands already: pooled processes of a test, or threads, which share a
        mailbox. `handles` has the communicators of earlier contexts of this process group, and keeps those of this
        one: under NCCL each costs a fraction of a second."""
        launch = Launch(rank=rank, world_size=config.world_size, local_rank=rank, local_world_size=config.world_size)
        context = cls._build(config, launch, torch.device(device), dtype, seed, owns=False, handles=handles)
        context.mailbox = mailbox
        return context

    @classmethod
    def fake(
        cls,
        config: ParallelConfig,
        rank: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "meta",
        seed: int = 1234,
    ) -> "ParallelContext":
        """Rank `rank` of `spec.world_size` without any other rank: what it would hold and send, never values.

        `stop` it before the next one: a process plays one rank at a time.
        """
        enter_fake_world(rank, config.world_size)
        launch = Launch(rank=rank, world_size=config.world_size)
        return cls._build(config, launch, torch.device(device), dtype, seed, owns=True, alone=True)

    @classmethod
    def _build(
        cls,
        config: ParallelConfig,
        launch: Launch,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        *,
        owns: bool,
        alone: bool = False,
        handles: Handles | None = None,
    ) -> "ParallelContext":
        config = replace(config, world_size=launch.world_size)
        groups = {}
        handles = {} if handles is None else handles
        for name, lists in all_groups(config).items():
            for ranks in lists:
                if alone and launch.rank not in ranks:
                    continue
                # Every rank takes part in making every group, in the same order.
                handle = _communicator(handles, ranks, "collectives") if len(ranks) > 1 else None
                if launch.rank in ranks:
                    groups[name] = ProcessGroup(name, ranks, ranks.index(launch.rank), handle, device)
        return cls(config, launch, groups, handles, device=device, dtype=dtype, seed=seed, owns_process_group=owns)

    def limit_waiting(self, seconds: float) -> None:
        """From now on a collective of any group waits so long for its peers."""
        for handle in dict.fromkeys(self._handles.values()):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), handle)

    def stop(self) -> None:
        """Leaves the process group. The context is of no use afterwards."""
        if self._owns_process_group:
            dist.destroy_process_group()

    def __str__(self) -> str:
        config = self.config
        return (
            f"using world size: {config.world_size}, data-parallel size: {config.dp}, "
            f"context-parallel size: {config.cp}, "
            f"tensor-model-parallel size: {config.tp}, pipeline-model-parallel size: {config.pp}, "
            f"expert-model-parallel size: {config.ep}, device: {self.device}, parameters: {self.dtype}"
        )


def _communicator(handles: Handles, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    if (ranks, purpose) not in handles:
        handles[ranks, purpose] = dist.new_group(list(ranks))
    return handles[ranks, purpose]


def _choose_device(wish: str, launch: Launch) -> torch.device:
    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise EnvironmentProblem("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if wish == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise EnvironmentProblem(
            f"local rank {launch.local_rank} has no GPU: this host shows {count}; start at most {count} processes here"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _rendezvous(config: ParallelConfig, launch: Launch, device: torch.device) -> None:
    if launch.master_addr in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if config.debug_collectives:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_meet(config, launch),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(minutes=config.distributed_timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise OtherRankProblem(
            f"rank {launch.rank} of {launch.world_size} could not meet the others at "
            f"{launch.master_addr}:{launch.master_port} within {config.distributed_timeout_minutes:g} minutes: "
            f"{error}; check that all ranks were started with the same master address and that the port is free",
            code=ExitCode.RENDEZVOUS,
        ) from error


def _meet(config: ParallelConfig, launch: Launch) -> dist.Store:
    """The store of the process group, after all ranks have come.

    torchrun's agent serves it, else the first rank. That one waits for the others here, rather than in the constructor
    of the store, which cannot say which ranks are missing; the others wait for its word.

    Raises OtherRankProblem on the first rank when others did not come; errors of torch otherwise.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    is_server = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = launch.master_addr, launch.master_port
    store = dist.TCPStore(address, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=is_server)
    came = [f"rank {rank} came" for rank in range(launch.world_size)]
    store.set(came[launch.rank], "")
    if launch.rank != 0:
        store.wait(["all ranks came"], timeout)
        return store
    try:
        store.wait(came, timeout)
    except dist.DistError as error:
        missing = [rank for rank, key in enumerate(came) if not store.check([key])]
        named = ", ".join(map(str, missing[:_MAX_NAMED])) + " ..." * (len(missing) > _MAX_NAMED)
        raise OtherRankProblem(
            f"{len(missing)} of {launch.world_size} ranks did not come to {address}:{port} within "
            f"{config.distributed_timeout_minutes:g} minutes: rank {named}; see what they printed, and "
            "check that all ranks were started with the same master address",
            missing[0] if missing else None,
            ExitCode.RENDEZVOUS,
        ) from error
    store.set("all ranks came", "")
    return store
