"""Options for activation memory (recompute, offload and paged stash) and for CUDA graphs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which activations the backward pass recomputes instead of keeping them in memory (`--recompute-*`,
    `--distribute-saved-activations`)."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Layers of full recompute. uniform: all layers, in chunks of `recompute_num_layers`. block: the first
    `recompute_num_layers` layers of each pipeline stage, one at a time. None disables full recompute."""
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    """Modules of selective recompute. Empty disables it."""
    distribute_saved_activations: bool = False
    """With full recompute, each tensor-parallel rank saves only its shard of the layer inputs. Requires that sequence
    parallelism is disabled (`--distribute-saved-activations`)."""

    def recomputes_layer(self, place: int) -> bool:
        """Whether full recompute includes the layer with index `place` in its stage."""
        if self.recompute_method == "block":
            return place < self.recompute_num_layers
        return self.recompute_method == "uniform"


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """Offload of saved activations to host memory between forward and backward."""

    offload_modules: tuple[str, ...] = ()
    activation_offload_fraction: float = 1.0
    """Fraction of the calls of `offload_modules` in a forward pass whose saved tensors are offloaded, starting with the
    first call (`--activation-offload-fraction`)."""
    min_offloaded_tensor_size: int = 1 << 20
    delta_offload_bytes_across_pp_ranks: int = 0
    """Per microbatch, pipeline rank r keeps r times this number of bytes on the device instead of offloading them
    (`--delta-offload-bytes-across-pp-ranks`)."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Maximum number of concurrent copies to the host per module name. None means no limit."""
    delay_offload_until_cuda_graph: bool = False
    """Starts copies to the host after the next replay of a captured module."""
    optimizer_fraction: float = 0.0
    """Fraction of the master weights and optimizer moments that stays in host memory during forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PagedStashConfig:
    """Paged stash of expert activations: saves only the used rows of worst-case-sized expert buffers, in pages."""

    moe_paged_stash_page_size: int = 64
    """Number of activation rows per page."""
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    """Capacity of the stash, divided by the peak number of rows that are saved if the expert load is even."""
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    """Capacity of the overflow stash in host memory, divided by the peak number of rows that are saved if the expert
    load is even; 0 means that there is no overflow stash."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options that trade activation memory against step time. Only `moe_expert_wgrad_interval`, which saves time and
    costs memory, affects numerics."""

    recompute: RecomputeConfig = RecomputeConfig()
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    paged_stash: PagedStashConfig | None = None
    """Paged stash of expert activations. None means that whole buffers are saved for backward, including unused
    rows."""
    moe_expert_wgrad_interval: int = 1
    """Number of microbatches whose expert weight gradients are computed in one GEMM (`--moe-expert-wgrad-interval`).
    The operands of these microbatches are kept until then. Values above 1 change the rounding."""


GraphModule = Literal["attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"]


def graph_module(node: str) -> str:
    """Value of `--cuda-graph-modules` that captures the node of a mixer."""
    return "attn" if node == "attention" else node


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """CUDA graphs, either of modules of the decoder layers or of the full iteration."""

    cuda_graph_modules: tuple[GraphModule, ...] = ()
    """Modules of the decoder layers to capture as CUDA graphs. Empty if none are captured."""
    full_iteration: bool = False
    """Captures forward and backward of all microbatches of a step as one CUDA graph."""
    cuda_graph_warmup_steps: int = 3
    """Number of steps that run without graphs before the capture."""
