"""Device and kernel flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, new_flag
from arguments.values import FilePath


@dataclass(frozen=True, kw_only=True)
class KernelsFlags:
    """Device, kernel backends, CUDA graphs."""

    device: Literal["auto", "cpu", "cuda"] = new_flag("auto", essential=True)
    """Device of the run; auto selects a GPU if one is available."""
    kernel_backend: str = new_flag("auto")
    """Backend of all kernels; auto selects the fastest installed backend for each op; reference is plain PyTorch."""
    kernel_per_op: tuple[str, ...] = new_flag(())
    """Backends of individual ops, as OP=BACKEND; they override `--kernel-backend`."""

    kernel_cache_dir: FilePath | None = new_flag(None)
    """Folder for compiled kernels, with one subfolder per node. Default: megatron_moe/ in the user's cache folder."""
    compile_first: bool = new_flag(True)
    """On a GPU, run a small step with one layer of each kind before ranks connect, to compile kernels in advance."""

    cross_entropy_loss_fusion: bool = differs(
        False, "only selects a kernel, except with --cross-entropy-fusion-impl linear"
    )
    """Use a fused cross-entropy loss."""
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = differs(
        "native", "native and te only select a kernel; linear computes logits for 1,024 tokens at a time"
    )
    """Implementation of `--cross-entropy-loss-fusion`. linear also fuses the output layer into the loss and recomputes
    logits in backward to save memory."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = differs(
        "none", "local and transformer_engine are equivalent; no effect on a CPU"
    )
    """Capture single modules (local, transformer_engine) or the full iteration (full_iteration) as CUDA graphs."""
    cuda_graph_modules: tuple[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"], ...] = differs(
        (), "default: all modules that can be captured; moe can also be captured without a capacity factor"
    )
    """Modules captured by `--cuda-graph-impl local` or `transformer_engine`."""
    cuda_graph_warmup_steps: int = differs(3, "0 still runs one eager iteration", least=0)
    """Number of eager iterations before CUDA graphs are captured."""
