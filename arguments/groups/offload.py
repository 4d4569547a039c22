"""What waits in host memory."""

from dataclasses import dataclass

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """Activations and optimizer state in host memory: saves device memory, changes no number."""

    fine_grained_activation_offloading: bool = flag(False, status="not yet", harmless=True)
    """Keep inputs of chosen modules in host memory until the backward pass."""
    offload_modules: tuple[str, ...] = flag((), status="not yet", harmless=True)
    """Those modules."""
    min_offloaded_tensor_size: int = flag(1048576, status="not yet", harmless=True)
    """Smallest tensor that moves, in elements."""
    delay_offload_until_cuda_graph: bool = flag(False, status="not yet", harmless=True)
    """Start copies after the replay of a captured part."""
    fine_grained_offloading_max_inflight_offloads: int | None = flag(None, status="not yet", harmless=True)
    """Copies under way at a time."""
    cpu_offloading: bool = flag(False, status="not yet", harmless=True)
    """Keep activations of whole layers in host memory."""
    cpu_offloading_num_layers: int = flag(0, status="not yet", harmless=True)
    """How many layers."""
    optimizer_cpu_offload: bool = flag(False, status="not yet", harmless=True)
    """Keep optimizer state in host memory and step there."""
    optimizer_offload_fraction: float = flag(1.0, status="not yet", harmless=True)
    """Share of the state."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, status="not yet", harmless=True)
    """Copy while the host steps."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False, status="not yet", harmless=True)
    """torch's optimizer on the host."""
    chunked_optimizer_state_offload: bool = flag(False, status="not yet", harmless=True)
    """Park optimizer state in host memory between steps."""
    optimizer_state_offload_chunk_size_mb: int = flag(0, status="not yet", harmless=True)
    """Size of the pieces that come back, in MiB."""
    optimizer_state_offload_fraction: float = flag(1.0, status="not yet", harmless=True)
    """Share of the state."""
    moe_paged_stash: bool = flag(False, status="not yet", harmless=True)
    """Keep activations of experts in pages of a common buffer."""
    moe_paged_stash_page_size: int = flag(64, status="not yet", harmless=True)
    """Tokens in a page."""
    moe_paged_stash_buffer_size_factor_cuda: float = flag(1.1, status="not yet", harmless=True)
    """Size of the device's buffer, as a multiple of the fair share."""
    moe_paged_stash_buffer_size_factor_cpu: float = flag(0.0, status="not yet", harmless=True)
    """Size of the host's buffer, as a multiple of the fair share."""
    delta_offload_bytes_across_pp_ranks: int = flag(0, status="not yet", harmless=True)
    """How much less a later pipeline stage moves."""
    activation_offload_fraction: float = flag(1.0, status="not yet", harmless=True)
    """Share of the modules' inputs that move."""
    pin_cpu_grads: bool = flag(True, status="no effect", note="belongs to --optimizer-cpu-offload")
    """Gradients in pinned host memory."""
    pin_cpu_params: bool = flag(True, status="no effect", note="belongs to --optimizer-cpu-offload")
    """Parameters in pinned host memory."""
