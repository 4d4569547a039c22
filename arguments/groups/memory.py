"""Memory-saving flags: activation recomputation and offload."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag, unsupported

_ACTIVATIONS_STAY = "use --fine-grained-activation-offloading"


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """Activation recomputation. Saves memory without changing results."""

    recompute_granularity: Literal["full", "selective"] | None = flag(None)
    """Recompute whole layers, or the modules of `--recompute-modules`. Default: no recompute."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """With `--recompute-granularity full`: recompute all layers in chunks (uniform), or only the first layers of each
    virtual stage (block)."""
    recompute_num_layers: int | None = flag(None, least=1)
    """With `--recompute-granularity full`: number of layers per recomputed chunk (uniform), or number of recomputed
    layers per virtual stage (block). Only the input of each chunk is saved."""
    recompute_modules: (
        tuple[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "mhc"], ...]
        | None
    ) = differs(None, "layernorm covers both norms of every layer; gated delta attention has no recomputable modules")
    """Modules recomputed by `--recompute-granularity selective`. Default: core_attn."""
    distribute_saved_activations: bool = flag(False)
    """Shard the saved inputs of recomputed layers over tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """Offload of activations and optimizer state to host memory. Saves device memory without changing results."""

    fine_grained_activation_offloading: bool = flag(False)
    """Keep the saved tensors of the modules in `--offload-modules` in host memory between forward and backward."""
    offload_modules: tuple[
        Literal[
            "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
        ],
        ...,
    ] = differs((), "a tensor saved by several modules is copied once")
    """Modules whose saved tensors `--fine-grained-activation-offloading` offloads; fused_group_mlp means expert_fc1 and
    moe_act."""
    min_offloaded_tensor_size: int = flag(1048576, least=0)
    """Number of elements below which `--fine-grained-activation-offloading` does not offload a tensor."""
    delay_offload_until_cuda_graph: bool = flag(False)
    """Start offload copies only after the next replay of the CUDA graph of a module, so that launching them does not
    delay the replay."""
    fine_grained_offloading_max_inflight_offloads: int | None = flag(None, least=0)
    """Maximum number of concurrent offload copies per module."""
    cpu_offloading: bool = unsupported(False, _ACTIVATIONS_STAY, harmless=True)
    """Offload the activations of whole layers."""
    cpu_offloading_num_layers: int = unsupported(0, _ACTIVATIONS_STAY, harmless=True)
    """Number of layers whose activations `--cpu-offloading` offloads."""
    optimizer_cpu_offload: bool = flag(False)
    """Keep optimizer state in host memory and run the optimizer step on the CPU."""
    optimizer_offload_fraction: float = differs(
        1.0, "offloads the first elements of every flat buffer, in blocks of 128", least=0
    )
    """Fraction of the optimizer state offloaded by `--optimizer-cpu-offload`."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False)
    """Overlap copies of gradients and weights with the CPU step of `--optimizer-cpu-offload`."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False)
    """Run the CPU step of `--optimizer-cpu-offload` with torch's fused kernel."""
    chunked_optimizer_state_offload: bool = flag(False)
    """Keep optimizer state in host memory between steps and copy it to the device in chunks for the step."""
    optimizer_state_offload_chunk_size_mb: int = differs(0, "0: one flat buffer per chunk", least=0)
    """Chunk size in MiB for `--chunked-optimizer-state-offload`."""
    optimizer_state_offload_fraction: float = flag(1.0, least=0)
    """Fraction of the optimizer state offloaded by `--chunked-optimizer-state-offload`."""
    moe_paged_stash: bool = flag(False)
    """Save expert activations for backward in pages of a shared buffer. Only rows in use take memory, so the buffer can
    be smaller than for the worst case. A step that overflows it is repeated without the stash."""
    moe_paged_stash_page_size: int = flag(64, least=1)
    """Page size of `--moe-paged-stash`, in tokens."""
    moe_paged_stash_buffer_size_factor_cuda: float = differs(
        1.1, "relative to the peak of in-flight rows, computed from the schedule", least=0
    )
    """Size of the `--moe-paged-stash` device buffer, as a multiple of the size needed with evenly balanced experts."""
    moe_paged_stash_buffer_size_factor_cpu: float = differs(
        0.0, "relative to the peak of in-flight rows, computed from the schedule", least=0
    )
    """Size of the `--moe-paged-stash` host buffer, as a multiple of the size needed with evenly balanced experts. Rows
    are saved there when the device buffer is full."""
    delta_offload_bytes_across_pp_ranks: int = flag(0, least=0)
    """Number of bytes, per microbatch and model chunk, that each pipeline rank offloads less than the previous rank."""
    activation_offload_fraction: float = flag(1.0, least=0)
    """Fraction of the module calls in a forward pass whose saved tensors are offloaded, starting with the first
    call."""
    pin_cpu_grads: bool = flag(True)
    """Use pinned host memory for the gradients of `--optimizer-cpu-offload`."""
    pin_cpu_params: bool = flag(True)
    """Use pinned host memory for the parameters of `--optimizer-cpu-offload`."""
