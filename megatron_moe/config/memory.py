"""What a run keeps on the device between forward and backward, and what it keeps elsewhere or computes again."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What the forward forgets and the backward computes again (Megatron's `--recompute-*`)."""

    granularity: Literal["none", "full", "selective"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    """Of "full": whole stages in chunks of `num_layers`, or the first `num_layers` of every stage one by one."""
    num_layers: int = 1
    modules: tuple[str, ...] = ()
    """Of "selective"."""
    distribute: bool = False
    """Of "full": tensor parallel ranks without sequence parallelism share out the inputs of layers."""


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """What waits in host memory."""

    modules: tuple[str, ...] = ()
    """Whose saved tensors move between forward and backward (`--offload-modules`)."""
    fraction: float = 1.0
    """Share of those tensors."""
    min_elements: int = 1 << 20
    """Smaller tensors stay."""
    stay_bytes_per_stage: int = 0
    """A pipeline rank keeps so many bytes of every microbatch more than the rank before it."""
    max_inflight: int | None = None
    """Copies of one module under way at a time; None: any number."""
    optimizer_fraction: float = 0.0
    """Share of master weights and moments that is not on the device during forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PagedStashConfig:
    """Rows of experts wait for the backward in pages, as far as they are used."""

    page_size: int = 64
    """Rows of a page."""
    factor: float = 1.1
    """Rows that the pages have room for, as a multiple of the fair share of all that wait at the same time."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Trades of memory against time. None of them changes a number, but for the last."""

    recompute: RecomputeConfig = RecomputeConfig()
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    stash: PagedStashConfig | None = None
    """None: rows are kept with the rows behind them that are not used."""
    expert_wgrad_interval: int = 1
    """Weight gradients of experts are computed once for so many microbatches, whose rows wait for that. Rows of several
    microbatches are summed before the buffer, so last digits change."""


GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Parts of layers, or whole steps, or nothing."""

    modules: tuple[GraphModule, ...] = ()
    """Parts of the decoder's layers."""
    full_iteration: bool = False
    """Forward and backward of all microbatches of a step, as one recording."""
    warmup_steps: int = 3
    """Steps that are computed before anything is recorded."""
