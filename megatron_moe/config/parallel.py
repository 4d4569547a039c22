"""How many ranks stand on each axis, and who this process is."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Who this process is, as the launcher told it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: Literal["none", "torchrun", "slurm", "openmpi", "dry run"] = "none"
    supervised: bool = False
    """The parent process is a launcher that waits for this rank: not a shell in which the variables were set."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the two grids over the same ranks: attention (pp, dp, cp, tp) and experts (pp, edp, ep, etp)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    sequence_parallel: bool = False
    virtual_stages: int = 1
    embedding_ranks: tuple[int, ...] | None = None
    """Pipeline ranks with a copy of the embedding, the first one first; None: the first and the last."""
    cp_split: Literal["zigzag", "contiguous"] = "zigzag"
    """Which places of a sequence a context-parallel rank holds; see `parallel/context_parallel.py`."""
    cp_sub_axes: tuple[int, int] | None = None
    """(a2a, p2p) sizes of the two levels of "a2a+p2p", whose product is cp; neighbours exchange heads."""
    max_seqlen_per_rank: int | None = None
    """Dynamic context parallelism: a microbatch is split over as few of the cp ranks as keep a rank's share of its
    longest document within so many tokens. None: over all of them."""
    order: str = "tp-cp-ep-dp-pp"
    """Axes from the fastest varying rank to the slowest."""
    timeout_minutes: float = 10.0
    debug_collectives: bool = False
    """Ranks tell each other what they are about to do together before they do it."""

    @property
    def dp(self) -> int:
        """Data-parallel size of the attention grid."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid."""
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """How gradients and weights travel between the ranks that hold copies of a parameter. Sizes are in elements."""

    sharded_optimizer: bool = False
    """ZeRO-1: each rank keeps and steps its share of the optimizer's state."""
    overlap_grad_reduce: bool = False
    """A bucket's reduction starts when its last gradient of the step has arrived, while the backward goes on."""
    overlap_param_gather: bool = False
    """New weights are waited for where the forward first needs them."""
    bucket_size: int | None = None
    num_buckets: int | None = None
    """Of all parameters of a rank together, about; instead of `bucket_size`. Neither: Megatron's rule."""
    pad_buckets: bool = False
    """Buckets end at multiples of 2^16, at which NCCL reaches its full bandwidth."""
    average_in_collective: bool = False
    """The collective takes the mean, instead of a sum that is divided afterwards."""
    fp32_sums: bool = False
    """Gradients of a narrower format travel in it, but are summed in fp32."""
