"""Optimizer, learning-rate and weight-decay flags."""

from dataclasses import dataclass
from typing import Annotated, Literal

from arguments.flag import REQUIRED, differs, flag, new_flag
from arguments.values import RefusedValues
from megatron_moe.config.registry import UPDATE_RULES

_REFUSED = RefusedValues(
    (
        ("soap", "is not available, because computing eigenvectors costs more than Newton-Schulz iterations; use muon"),
        ("sgd", "is not available, because MoE models are not trained with it; use adam or lion"),
    )
)


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer (AdamW, Lion or Muon), learning rate and weight decay."""

    optimizer: Annotated[str, UPDATE_RULES, _REFUSED] = differs("adam", "Megatron-LM also has sgd and soap")
    """Update rule. adam is AdamW; lion updates every element by the sign of a momentum. muon (old name dist_muon)
    orthogonalises the updates of matrices, adaptive_muon also divides them by the root of a second moment; AdamW
    updates embeddings, norms, biases and the output layer. Imported files may add rules (see `--import`)."""
    adam_beta1: float = flag(0.9, least=0, below=1)
    """Adam beta1: decay rate of the first moment."""
    adam_beta2: float = flag(0.999, least=0, below=1)
    """Adam beta2: decay rate of the second moment."""
    adam_eps: float = flag(1e-8, least=0)
    """Adam epsilon: constant that is added to the square root of the second moment."""
    lion_beta1: float = flag(0.95, least=0, below=1)
    """Lion: weight of the momentum in its interpolation with the gradient, whose sign is the update."""
    lion_beta2: float = flag(0.98, least=0, below=1)
    """Lion: decay rate of the momentum."""
    muon_momentum: float = flag(0.9, least=0, below=1)
    """Muon: decay rate of the momentum."""
    muon_nesterov: bool = flag(False)
    """Muon: Nesterov momentum."""
    muon_split_qkv: bool = flag(True, off=("--muon-no-split-qkv",))
    """Muon: orthogonalise the q, k and v parts of a projection separately."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag("spectral")
    """Muon: factor by which the update of a matrix is multiplied: sqrt(max(outputs, inputs)) (spectral), sqrt(outputs /
    inputs) (unit_rms_norm), or sqrt(max(1, outputs / inputs)) (shape_scaling)."""
    muon_extra_scale_factor: float = flag(1.0, least=0)
    """Muon: additional factor of the update. With spectral, 0.2 makes updates about as large as AdamW's."""
    muon_num_ns_steps: int = flag(5, least=1)
    """Muon: number of Newton-Schulz iterations."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "cubic5", "deepseekv4"] = flag(
        "quintic"
    )
    """Muon: coefficients of the Newton-Schulz iterations."""
    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = flag("medium")
    """Muon: dtype of the matmul operands in the Newton-Schulz iterations: bf16 (low, medium) or fp32 (high)."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag("duplicated")
    """Muon: how matrices sharded by tensor parallelism are orthogonalised: each shard separately (blockwise), the
    gathered matrix on every rank (duplicated), or with an all-reduce of the shards' partial matmul results
    (distributed)."""
    muon_scalar_optimizer: Literal["adam", "lion"] = flag("adam")
    """Muon: update rule of embeddings, norms, biases and the output layer."""
    clip_grad: float = flag(1.0, least=0)
    """Maximum global gradient norm; 0 disables clipping."""
    weight_decay: float = flag(0.01, least=0)
    """Decoupled weight decay coefficient."""
    start_weight_decay: float | None = flag(None, least=0)
    """Initial weight decay; required if `--weight-decay-incr-style` is linear or cosine."""
    end_weight_decay: float | None = flag(None, least=0)
    """Final weight decay; required if `--weight-decay-incr-style` is linear or cosine."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant")
    """Weight decay: constant (`--weight-decay`), or growth from `--start-weight-decay` to `--end-weight-decay`."""
    apply_wd_to_qk_layernorm: bool = flag(False)
    """Also apply weight decay to query and key norms."""
    overlap_optimizer_step: bool = new_flag(False)
    """Overlap the optimizer step of each layer with the next forward pass; results are bitwise identical."""

    lr: float = flag(REQUIRED, least=0, essential=True)
    """Maximum learning rate."""
    min_lr: float = flag(0.0, least=0, essential=True)
    """Minimum learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", essential=True
    )
    """Learning-rate schedule after warmup."""
    lr_decay_iters: int | None = flag(None, least=1)
    """Iteration at which the learning rate reaches its minimum. Default: the last iteration of the run."""
    lr_decay_samples: int | None = flag(None, least=1)
    """Number of consumed samples at which the learning rate reaches its minimum. Default: all samples of the run."""
    lr_warmup_iters: int = flag(0, least=0, essential=True)
    """Number of iterations of linear warmup."""
    lr_warmup_samples: int = flag(0, least=0)
    """Number of samples of linear warmup."""
    lr_warmup_fraction: float | None = flag(None, least=0, below=1)
    """Length of the linear warmup as a fraction of `--lr-decay-iters` or `--lr-decay-samples`. Default:
    `--lr-warmup-iters` or `--lr-warmup-samples` sets the length."""
    lr_warmup_init: float = flag(0.0, least=0)
    """Initial learning rate of warmup."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential")
    """Decay function of the final phase of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, least=1)
    """Length of the final decay phase of the WSD schedule in iterations; WSD requires this or
    `--lr-wsd-decay-samples`."""
    lr_wsd_decay_samples: int | None = flag(None, least=1)
    """Length of the final decay phase of the WSD schedule in samples; WSD requires this or `--lr-wsd-decay-iters`."""
    decoupled_lr: float | None = flag(None, least=0)
    """Maximum learning rate of the embedding and the output layer. Default: `--lr`."""
    decoupled_min_lr: float | None = flag(None, least=0)
    """Minimum learning rate of the embedding and the output layer, with `--decoupled-lr`. Default: `--min-lr`."""
    override_opt_param_scheduler: bool = flag(False, names=("--override-opt_param-scheduler",))
    """On resume, use the learning-rate schedule of the command line instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(False, names=("--use-checkpoint-opt_param-scheduler",))
    """On resume, use the learning-rate schedule of the checkpoint instead of the command line's."""
