"""What waits in host memory."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag

_ACTIVATIONS_STAY = "activations stay on the device; smaller microbatches or more ranks need less memory"
_ON_DEVICE = "pages are on the device; --moe-paged-stash-buffer-size-factor-cuda says how many"


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """Activations and optimizer state in host memory: saves device memory, changes no number."""

    fine_grained_activation_offloading: bool = flag(False)
    """What chosen modules save for the backward pass waits in host memory."""
    offload_modules: tuple[
        Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"], ...
    ] = flag((), status="close", note="memory moves once, whichever of the modules save it")
    """Modules of `--fine-grained-activation-offloading`."""
    min_offloaded_tensor_size: int = flag(1048576, least=0)
    """Of `--fine-grained-activation-offloading`: smallest tensor that moves, in elements."""
    delay_offload_until_cuda_graph: bool = flag(False, status="not yet", harmless=True, note=_ACTIVATIONS_STAY)
    """Start copies after the replay of a captured part."""
    fine_grained_offloading_max_inflight_offloads: int | None = flag(None, least=0)
    """Copies of one module under way at a time."""
    cpu_offloading: bool = flag(False, status="not yet", harmless=True, note=_ACTIVATIONS_STAY)
    """Keep activations of whole layers in host memory."""
    cpu_offloading_num_layers: int = flag(0, status="not yet", harmless=True, note=_ACTIVATIONS_STAY)
    """Layers of `--cpu-offloading`."""
    optimizer_cpu_offload: bool = flag(False)
    """Keep optimizer state in host memory and step there."""
    optimizer_offload_fraction: float = flag(
        1.0, least=0, status="close", note="the first elements of every flat buffer, in blocks of 128"
    )
    """Share of the optimizer's state that `--optimizer-cpu-offload` keeps in host memory."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False)
    """Of `--optimizer-cpu-offload`: copy gradients and weights while the host steps."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False)
    """Of `--optimizer-cpu-offload`: step by torch's fused kernel on the host."""
    chunked_optimizer_state_offload: bool = flag(False)
    """Park optimizer state in host memory between steps."""
    optimizer_state_offload_chunk_size_mb: int = flag(
        0, least=0, status="close", note="0: a whole flat buffer at a time"
    )
    """Of `--chunked-optimizer-state-offload`: size of the pieces that come back, in MiB."""
    optimizer_state_offload_fraction: float = flag(1.0, least=0)
    """Share of the optimizer's state that `--chunked-optimizer-state-offload` parks."""
    moe_paged_stash: bool = flag(
        False, status="close", note="a step whose rows find no room is refused instead of repeated"
    )
    """Rows of experts wait for the backward in pages of a common buffer, as far as they are used."""
    moe_paged_stash_page_size: int = flag(64, least=1)
    """Of `--moe-paged-stash`: tokens in a page."""
    moe_paged_stash_buffer_size_factor_cuda: float = flag(
        1.1, least=0, status="close", note="of all rows that wait at the same time, counted from the schedule"
    )
    """Size of the device's buffer, as a multiple of the fair share."""
    moe_paged_stash_buffer_size_factor_cpu: float = flag(0.0, status="not yet", harmless=True, note=_ON_DEVICE)
    """Size of the host's buffer, as a multiple of the fair share."""
    delta_offload_bytes_across_pp_ranks: int = flag(0, least=0)
    """Bytes of every microbatch and chunk that a pipeline rank moves less than the rank before it."""
    activation_offload_fraction: float = flag(1.0, least=0)
    """Share of the groups of saved tensors that move, the first ones."""
    pin_cpu_grads: bool = flag(True)
    """Gradients in pinned host memory."""
    pin_cpu_params: bool = flag(True)
    """Parameters in pinned host memory."""
