"""Device and kernel flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class KernelsFlags:
    """Device, kernel backends, CUDA graphs."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", status="ours", essential=True)
    """Device; auto selects a GPU if available."""
    kernel_backend: str = flag("auto", status="ours")
    """Backend of all kernels; auto selects the fastest installed one, reference is plain torch."""
    kernel_per_op: tuple[str, ...] = flag((), status="ours")
    """Backends of individual ops, as OP=BACKEND."""

    kernel_cache_dir: str | None = flag(None, status="ours")
    """Folder for compiled kernels, with one subfolder per node. Not set: megatron_moe in the user's cache folder."""
    compile_first: bool = flag(True, status="ours")
    """On a GPU, compile kernels and create library plans before ranks connect, by running one layer of each kind."""

    cross_entropy_loss_fusion: bool = flag(
        False, status="close", note="only selects a kernel, except with --cross-entropy-fusion-impl linear"
    )
    """Use a fused cross-entropy loss."""
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = flag(
        "native",
        status="close",
        note="native and te only select a kernel; linear computes logits for 1,024 tokens at a time",
    )
    """Implementation of the fused loss; linear, with --cross-entropy-loss-fusion, also fuses the output layer and
    recomputes logits in backward to save memory."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = flag(
        "none", status="close", note="local and transformer_engine are the same; no effect on a CPU"
    )
    """Capture modules of layers, or whole iterations, as CUDA graphs and replay them."""
    cuda_graph_modules: tuple[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"], ...] = flag(
        (), status="close", note="default: all modules that can be captured; moe may be dropless"
    )
    """Modules to capture."""
    cuda_graph_warmup_steps: int = flag(3, least=0, status="close", note="0 still runs one eager iteration")
    """Eager iterations before capture."""
