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
    restart_count: int = 0
    launcher: Literal["none", "torchrun", "slurm", "openmpi"] = "none"


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of the two grids over the same ranks: attention (pp, dp, cp, tp) and experts (pp, edp, ep, etp)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    sequence_parallel: bool = False
    virtual_stages: int = 1
    order: str = "tp-cp-ep-dp-pp"
    """Axes from the fastest varying rank to the slowest."""
    timeout_minutes: float = 10.0

    @property
    def dp(self) -> int:
        """Data-parallel size of the attention grid."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid."""
        return self.world_size // (self.etp * self.ep * self.pp)
