"""Config of fully sharded data parallelism (`--use-megatron-fsdp`), and the units that it gathers and reduces."""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.param_meta import Grid
from megatron_moe.config.precision import FloatName

NUM_BUFFERS = 2
"""Number of layers whose weights (or gradients) are in memory at the same time, per pass."""


MOST_RECEIVE_BYTES = 2**29
"""Maximum size of a receive buffer for gradients. A rank has one for dense parameters and one for experts. Larger units
are reduced in several rounds."""


def unit_of(name: str, grid: Grid) -> str:
    """Name of the unit of a parameter, given its global name: `embedding`, `layers.N`, `layers.N.experts`, `mtp.N`,
    `mtp.N.experts` or `head` (final norm and output layer)."""
    layer = re.match(r"(?:decoder\.(layers)|(mtp)\.layers)\.(\d+)\.", name)
    if layer is None:
        first = name.partition(".")[0]
        return "head" if first in ("decoder", "output_layer") else first
    unit = f"{layer[1] or layer[2]}.{layer[3]}"
    return f"{unit}.experts" if grid == "expert" else unit


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Sharding of gradients and weights over data-parallel ranks, in units such as the experts of a layer."""

    shards_weights: bool = True
    """Selects ZeRO-3, where the weights of a layer are gathered before use; if False, ZeRO-2, where only gradients are
    sharded."""
    fsdp_double_buffer: bool = False
    """Gathers weights into two buffers at fixed addresses (`--fsdp-double-buffer`) instead of newly allocated
    memory."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """"optim" also shards the optimizer state over the replicas of the weight shards (hybrid FSDP with
    `--num-distributed-optimizer-instances`); "no_shard" replicates it."""
    gathers_from_peers: bool = False
    """Gathers weights inside a host by copies from the memory of the other GPUs (`--fsdp-gather-backend`). The first
    gather after an update remains a collective."""
    reduces_through_peers: bool = False
    """Reduces gradients inside a host by copies to the memory of the other GPUs (`--fsdp-reduce-backend`)."""
    grad_comm: FloatName | None = None
    """Dtype in which a microbatch's gradients are computed and reduced; None means the dtype of the accumulated
    gradients (`--megatron-fsdp-grad-comm-dtype`)."""
    num_passes: Literal[1, 2] = 1
    """Number of passes that use weights at the same time: 2 if forward and backward of two microbatches interleave."""
