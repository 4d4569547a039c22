"""Optimizer and learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerOffloadConfig:
    """Offload of master weights and moments to host memory."""

    fraction: float = 0.0
    """Fraction of a rank's optimizer state to offload: the first elements of each buffer, in whole blocks."""
    cpu_step: bool = False
    """Runs the update of offloaded state on the CPU (`--optimizer-cpu-offload`) instead of copying the state to the
    device for the update (`--chunked-optimizer-state-offload`)."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """CPU step: overlaps the copies of gradients and weights with the update."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """CPU step: uses torch's fused AdamW, which is faster and rounds differently from the reference."""
    pin_cpu_grads: bool = True
    """CPU step: page-locked buffers for gradients."""
    pin_cpu_params: bool = True
    """CPU step: page-locked buffers for weights."""
    chunk_bytes: int = 0
    """Device step: bytes of state per chunk, with two chunks on the device at a time; 0: all state at once."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with decoupled weight decay."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Maximum global L2 norm of the gradient; 0: no clipping."""
    apply_wd_to_qk_layernorm: bool = False
    """Applies weight decay to q and k norms (`--apply-wd-to-qk-layernorm`)."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and head; None: `LRConfig.max_lr`."""
    decoupled_min_lr: float | None = None
    offload: OptimizerOffloadConfig = OptimizerOffloadConfig()
    overlap_optimizer_step: bool = False
    """Overlaps the update with the next forward, bucket by bucket (`--overlap-optimizer-step`)."""


@dataclass(frozen=True, kw_only=True)
class LRConfig:
    """Schedules of learning rate and weight decay. Every `*_samples` counts sequences."""

    max_lr: float
    """`--lr`"""
    min_lr: float = 0.0
    init_lr: float = 0.0
    """`--lr-warmup-init`"""
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    warmup_samples: float = 0
    """Samples of linear warm-up; fractional if set as a fraction of `decay_samples`."""
    decay_samples: int
    """Samples until `min_lr` is reached."""
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """`--lr-wsd-decay-style`"""
    wsd_decay_samples: int | None = None
    """Samples of the final decay of style WSD."""
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """`--weight-decay-incr-style`"""
    weight_decay_samples: int | None = None
    """Samples over which weight decay changes from start to end (Megatron: the whole run); None: `decay_samples`."""
    override_opt_param_scheduler: bool = False
    """Uses the command line's schedule if the checkpoint has a different one (`--override-opt-param-scheduler`)."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Uses the checkpoint's schedule (`--use-checkpoint-opt-param-scheduler`)."""
