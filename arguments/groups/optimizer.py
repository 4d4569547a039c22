"""The optimizer, the learning rate and weight decay."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import REQUIRED, flag


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """AdamW, learning rate and weight decay."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"] = flag(
        "adam", status="not yet", note="use adam"
    )
    """Which optimizer; adam has decoupled weight decay."""
    adam_beta1: float = flag(0.9, least=0, below=1)
    """Decay of the first moment."""
    adam_beta2: float = flag(0.999, least=0, below=1)
    """Decay of the second moment."""
    adam_eps: float = flag(1e-8, least=0)
    """Added to the root of the second moment."""
    clip_grad: float = flag(1.0, least=0)
    """Largest global norm of the gradient; 0: no clipping."""
    weight_decay: float = flag(0.01, least=0)
    """Decoupled weight decay."""
    start_weight_decay: float | None = flag(None, least=0)
    """First value of a changing weight decay."""
    end_weight_decay: float | None = flag(None, least=0)
    """Last value of a changing weight decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant")
    """How weight decay changes."""
    apply_wd_to_qk_layernorm: bool = flag(False)
    """Weight decay on the norms of queries and keys too."""
    overlap_optimizer_step: bool = flag(False, status="ours")
    """Step the weights of every layer while the next forward begins; the numbers stay the same."""

    lr: float = flag(REQUIRED, least=0, essential=True)
    """Largest learning rate."""
    min_lr: float = flag(0.0, least=0, essential=True)
    """Smallest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", essential=True
    )
    """How the learning rate falls after warm-up."""
    lr_decay_iters: int | None = flag(None, least=1)
    """Iterations until the smallest learning rate. Not set: all."""
    lr_decay_samples: int | None = flag(None, least=1)
    """Samples until the smallest learning rate. Not set: all."""
    lr_warmup_iters: int = flag(0, least=0, essential=True)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = flag(0, least=0)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, least=0, below=1)
    """Warm-up as a share of the decay length."""
    lr_warmup_init: float = flag(0.0, least=0)
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential")
    """WSD: shape of the last part."""
    lr_wsd_decay_iters: int | None = flag(None, least=1)
    """WSD: iterations of the last part."""
    lr_wsd_decay_samples: int | None = flag(None, least=1)
    """WSD: samples of the last part."""
    decoupled_lr: float | None = flag(None, least=0)
    """Largest learning rate of embedding and head."""
    decoupled_min_lr: float | None = flag(None, least=0)
    """Smallest learning rate of embedding and head."""
    override_opt_param_scheduler: bool = flag(False, names=("--override-opt_param-scheduler",))
    """On resume, the command line's learning rate wins over the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(False, names=("--use-checkpoint-opt_param-scheduler",))
    """On resume, the checkpoint's learning rate wins over the command line's."""
