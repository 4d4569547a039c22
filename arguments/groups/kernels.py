"""Which code computes: device, backends, and names of other programs' kernels."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class KernelFlags:
    """Device, kernel backends, CUDA graphs."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", status="ours", essential=True)
    """Where to compute; auto takes a GPU if there is one."""
    kernel_backend: str = flag("auto", status="ours")
    """Backend of all kernels; auto takes the fastest that is installed, reference is plain torch."""
    kernel_per_op: tuple[str, ...] = flag((), status="ours")
    """Backends of single kernels, written OP=BACKEND."""

    kernel_cache_dir: str | None = flag(None, status="ours")
    """Folder for compiled kernels, with a folder per node in it. Not set: megatron_moe in the user's cache."""
    compile_first: bool = flag(True, status="ours")
    """On a GPU compile kernels and make the plans of libraries before ranks meet, on one layer of every kind."""

    cross_entropy_loss_fusion: bool = flag(
        False, status="close", note="alone it names a kernel; see --cross-entropy-fusion-impl linear"
    )
    """Fused loss."""
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = flag(
        "native", status="close", note="native and te name a kernel; linear makes the logits of 1,024 tokens at a time"
    )
    """Library of the fused loss; linear, with --cross-entropy-loss-fusion, fuses the head too: fewer logits in memory,
    which the backward makes again."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = flag(
        "none", status="close", note="local and transformer_engine are the same; on a CPU nothing is recorded"
    )
    """Record parts of layers, or whole steps, as CUDA graphs, and replay them."""
    cuda_graph_modules: tuple[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"], ...] = flag(
        (), status="close", note="without it all parts that can be recorded are; moe may be dropless"
    )
    """Recorded parts of layers."""
    cuda_graph_warmup_steps: int = flag(3, least=0, status="close", note="0 computes one step as well")
    """Iterations that are computed before anything is recorded."""
