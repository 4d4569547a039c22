"""Parallel contexts of ranks that are pooled processes or threads."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.parallel.context import Handles, ParallelContext


def context_of_rank(
    config: ParallelConfig,
    rank: int,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    seed: int = 1234,
    handles: Handles | None = None,
    make_links: Callable[[ParallelContext], Any] | None = None,
) -> ParallelContext:
    """Context of `rank` in an existing process group.

    `handles`: communicators of earlier contexts in the same process group, which are reused because creating an NCCL
    communicator takes a fraction of a second. New communicators are added in place.
    """
    size = config.world_size
    launch = ProcessInfo(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    handles = {} if handles is None else handles
    return ParallelContext(config, launch, torch.device(device), dtype, seed, handles, make_links=make_links)
