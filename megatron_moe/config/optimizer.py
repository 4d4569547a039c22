"""Optimizer and learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerOffloadConfig:
    """Which part of master weights and moments waits in host memory, and who steps it."""

    fraction: float = 0.0
    """Share of what a rank owns, in elements: the first ones of every buffer, in whole blocks."""
    host_steps: bool = False
    """The host updates that part (`--optimizer-cpu-offload`). False: it visits the device for the update
    (`--chunked-optimizer-state-offload`)."""
    overlap: bool = False
    """Host steps: gradients and weights travel while the host computes."""
    torch_kernel: bool = False
    """Host steps: by torch's fused AdamW, which is faster and rounds in another order than the reference."""
    pin_grads: bool = True
    pin_params: bool = True
    chunk_bytes: int = 0
    """Visits to the device: bytes of state that are there at a time, of two chunks; 0: everything at once."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with decoupled weight decay."""

    kind: Literal["adam"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0: no clipping."""
    decay_qk_norm: bool = False
    decoupled_lr: float | None = None
    """Of embedding and head."""
    decoupled_min_lr: float | None = None
    offload: OptimizerOffloadConfig = OptimizerOffloadConfig()
    in_forward: bool = False
    """The update goes on under the next forward, whose layers wait for their own weights."""


@dataclass(frozen=True, kw_only=True)
class LRConfig:
    """Learning rate and weight decay over samples. Every `*_samples` counts sequences."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    warmup_samples: float = 0
    """A share of `decay_samples` need not be whole."""
    decay_samples: int
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    wsd_decay_samples: int | None = None
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay_samples: int | None = None
    """Over which weight decay moves from start to end (Megatron: the whole run); None: `decay_samples`."""
    override: bool = False
    """The command line wins over the checkpoint."""
    use_checkpoint: bool = False
