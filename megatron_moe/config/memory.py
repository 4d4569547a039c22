"""Activation memory: recompute, offload and paged stash; CUDA graphs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation recompute (`--recompute-*`)."""

    recompute_granularity: Literal["none", "full", "selective"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Full recompute only. uniform: all layers, in chunks of `recompute_num_layers`; block: the first
    `recompute_num_layers` layers of each stage, one at a time."""
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    """Modules of selective recompute."""
    distribute_saved_activations: bool = False
    """Full recompute without sequence parallelism: shards the saved layer inputs over tensor-parallel ranks
    (`--distribute-saved-activations`)."""


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """Offload of saved activations to host memory between forward and backward."""

    offload_modules: tuple[str, ...] = ()
    """Modules whose saved tensors are offloaded (`--offload-modules`)."""
    activation_offload_fraction: float = 1.0
    """Fraction of these modules' saved bytes that is offloaded (`--activation-offload-fraction`)."""
    min_offloaded_tensor_size: int = 1 << 20
    """Tensors with fewer elements than this are not offloaded (`--min-offloaded-tensor-size`)."""
    delta_offload_bytes_across_pp_ranks: int = 0
    """Pipeline rank r offloads r times this number of bytes less per microbatch than without this option
    (`--delta-offload-bytes-across-pp-ranks`)."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Maximum number of concurrent offload copies of one module; None: unlimited."""
    optimizer_fraction: float = 0.0
    """Fraction of master weights and moments that is in host memory during forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PagedStashConfig:
    """Paged stash: saves only the used expert rows for backward, in pages, instead of whole worst-case buffers."""

    moe_paged_stash_page_size: int = 64
    """Rows per page."""
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    """Capacity of the stash as a multiple of the number of in-flight rows at an even expert load."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options that trade time for memory; only `moe_expert_wgrad_interval` affects numerics."""

    recompute: RecomputeConfig = RecomputeConfig()
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    paged_stash: PagedStashConfig | None = None
    """None: saves whole buffers of expert rows, including unused rows."""
    moe_expert_wgrad_interval: int = 1
    """Computes expert weight gradients once every this many microbatches (`--moe-expert-wgrad-interval`). The expert
    rows of these microbatches are kept until then and multiplied in one GEMM, which changes the rounding."""


GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """CUDA graphs of layer modules or of the full iteration."""

    cuda_graph_modules: tuple[GraphModule, ...] = ()
    """Decoder layer modules to capture; empty: none."""
    full_iteration: bool = False
    """Captures forward and backward of all microbatches of a step as one graph."""
    cuda_graph_warmup_steps: int = 3
    """Number of steps before capture."""
