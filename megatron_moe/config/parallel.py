"""Parallel sizes, rank of this process, and data-parallel communication."""

from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.fsdp import FSDPConfig


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """Rank and rendezvous of this process, as set by its launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: Literal["none", "torchrun", "slurm", "openmpi", "dry run"] = "none"
    supervised: bool = False
    """True if the parent process is a launcher such as torchrun or srun; the rank then exits when the launcher dies.
    False if the user set the environment variables of the rank in a shell."""
    start_id: str = ""
    """Id of this launch of the run, equal on all ranks. Earlier launches, whose ranks may still be alive, have other
    ids. Empty if the launcher provides no such id."""
    parent: int = 0
    """Process id of the parent when this process started; 0 if unknown."""
    missing_libraries: tuple[str, ...] = ()
    """Modules of expert transports that are not installed on this machine. Empty if the plan must not depend on it."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of two grids over the same ranks: attention (pp, dp, cp, tp) and experts (pp, edp, ep, etp)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    sequence_parallel: bool = False
    virtual_stages: int = 1
    """Virtual pipeline stages (model chunks) per pipeline rank."""
    embedding_ranks: tuple[int, ...] | None = None
    """Pipeline ranks that hold a copy of the word embedding, in stage order; None means the first and the last rank."""
    cp_split: Literal["zigzag", "contiguous"] = "zigzag"
    """Assignment of sequence positions to context-parallel ranks (`parallel/context_parallel.py`)."""
    cp_sub_axes: tuple[int, int] | None = None
    """Hierarchical context parallelism: (ranks per all-to-all group, ranks per p2p group). Their product is cp. Ranks
    of an all-to-all group are adjacent (`--hierarchical-context-parallel-sizes`). None if cp is not divided."""
    min_dynamic_context_parallel_size: int = 1
    """Minimum number of ranks per sequence with dynamic context parallelism."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Dynamic context parallelism (`--dynamic-context-parallel`): maximum number of tokens of one document per rank.
    A microbatch is split over as many ranks as its longest document needs. None means that it is split over all cp
    ranks."""
    num_distributed_optimizer_instances: int = 1
    """Number of replicas of the sharded weights; each data-parallel group is divided into this many groups of
    adjacent ranks that shard them (`--num-distributed-optimizer-instances`)."""
    init_model_with_meta_device: bool = False
    """Creates parameters without memory; the gradient buffers allocate and initialise them unit by unit
    (`--init-model-with-meta-device`)."""
    order: str = "tp-cp-ep-dp-pp"
    """Order in which the grid axes are assigned to consecutive ranks, fastest varying first."""
    ranks_per_host: int | None = None
    """Number of ranks per host, which are filled in ascending order of ranks; None means that all ranks share one
    host."""
    shares_memory: bool = False
    """Whether GPUs of one host may exchange the tokens of experts, and keys and values, through each other's memory."""
    missing_libraries: tuple[str, ...] = ()
    """Modules of expert transports that are not installed; see `ProcessInfo`."""
    distributed_timeout_minutes: float = 10.0
    """Timeout of collectives, in minutes (`--distributed-timeout-minutes`)."""
    high_priority_a2a_comm_stream: bool = False
    """Runs expert communication on CUDA streams of high priority (`--high-priority-a2a-comm-stream`)."""
    tp_comm_overlap: tuple[str, ...] = ()
    """GEMMs that overlap with tensor-parallel communication (`--tp-comm-overlap`), by their names in
    `config/tp_overlap.py`."""
    debug_collectives: bool = False
    """Checks before each collective that all ranks of the group call it with equal shapes (torch.distributed's debug
    level DETAIL)."""

    @property
    def dp(self) -> int:
        """Data-parallel size of the attention grid."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def shares_keys_values(self) -> bool:
        """Whether context-parallel ranks copy keys and values from each other's memory. With dynamic context
        parallelism, other groups of ranks exchange them."""
        if self.cp == 1 or not self.shares_memory or self.max_seqlen_per_dp_cp_rank is not None:
            return False
        on_host = self.ranks_per_host
        return on_host is None or self.world_size <= on_host or on_host % (self.tp * self.cp) == 0

    @property
    def experts_span_hosts(self) -> bool:
        """True if a group of etp x ep ranks, which are consecutive, spans several hosts."""
        if self.ranks_per_host is None or self.world_size <= self.ranks_per_host:
            return False
        return self.ranks_per_host % (self.etp * self.ep) != 0


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Gradient reduction and weight gathering over data-parallel ranks (`--ddp-*`)."""

    use_distributed_optimizer: bool = False
    """ZeRO-1: each rank stores and updates a shard of the optimizer state (`--use-distributed-optimizer`)."""
    overlap_grad_reduce: bool = False
    """Starts a bucket's reduction as soon as its last gradient is ready, overlapped with the backward."""
    overlap_param_gather: bool = False
    """Gathers updated weights bucket by bucket, overlapped with the next forward."""
    ddp_bucket_size: int | None = None
    """Elements per bucket. If None, `ddp_num_buckets` determines it; if both are None, Megatron's default is used."""
    ddp_num_buckets: int | None = None
    """Approximate number of buckets per rank, from which the bucket size is computed instead of `ddp_bucket_size`; None
    if not given."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pads buckets to multiples of 2^16 elements, for full NCCL bus bandwidth."""
    ddp_average_in_collective: bool = False
    """Averages gradients in the collective, instead of summing them and scaling the result."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    """Reduce-scatter communicates gradients in the format of the gradient buffers but sums them in fp32
    (`--ddp-reduce-scatter-with-fp32-accumulation`)."""
    fsdp: FSDPConfig | None = None
    """Sharding of gradients and weights (ZeRO-2 and ZeRO-3); None means that every rank stores all gradients and
    weights."""

    def num_owners(self, parallel: ParallelConfig) -> dict[str, int]:
        """Number of ranks among which the optimizer state of a grid is divided."""
        if not self.use_distributed_optimizer:
            return {"attention": 1, "expert": 1}
        owners = {"attention": parallel.dp * parallel.cp, "expert": parallel.edp}
        if self.fsdp is None or self.fsdp.outer_dp_sharding_strategy != "no_shard":
            return owners
        # replicas of shards have equal optimizer state
        return {grid: max(size // parallel.num_distributed_optimizer_instances, 1) for grid, size in owners.items()}


def default_bucket_size(num_ranks: int) -> int:
    """Default elements per bucket, large enough that a collective over `num_ranks` is bound by bandwidth."""
    return max(40_000_000, 1_000_000 * num_ranks)
