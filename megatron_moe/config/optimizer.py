"""Optimizer and learning-rate schedule."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerOffloadConfig:
    """Offload of optimizer state (master weights and moments) to host memory."""

    fraction: float = 0.0
    """Fraction of a rank's optimizer state that is offloaded."""
    cpu_step: bool = False
    """Runs the update of offloaded state on the CPU (`--optimizer-cpu-offload`) instead of copying the state to the
    device for the update (`--chunked-optimizer-state-offload`)."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """With `cpu_step`, overlaps the copies of gradients to the host and of weights to the device with the update."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """With `cpu_step`, uses torch's fused AdamW, which is faster than the default and rounds differently."""
    pin_cpu_grads: bool = True
    """With `cpu_step`, allocates the host buffers of gradients in page-locked memory."""
    pin_cpu_params: bool = True
    """With `cpu_step`, allocates the host buffers of weights in page-locked memory."""
    chunk_bytes: int = 0
    """Bytes of offloaded state per chunk. An update on the device holds two chunks at a time. 0 disables chunking."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Hyperparameters of Muon."""

    muon_momentum: float = 0.9
    muon_nesterov: bool = False
    muon_split_qkv: bool = True
    """Orthogonalises the q, k and v parts of a projection separately."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_num_ns_steps: int = 5
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "cubic5", "deepseekv4"] = (
        "quintic"
    )
    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = "medium"
    """Precision of the matmuls in an iteration: bf16 operands (low, medium) or fp32 operands (high)."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "duplicated"
    """Orthogonalisation of matrices that are sharded by tensor parallelism. blockwise: every rank orthogonalises its
    shard separately. duplicated: every rank orthogonalises the gathered matrix. distributed: ranks all-reduce the
    partial matmul results of their shards."""
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Update rule of the parameters that Muon does not cover."""


@dataclass(frozen=True, kw_only=True)
class QKClipConfig:
    """QK-clip (Kimi-K2, arXiv 2507.20534): after a step, the q and k weights of a head with a larger logit S than the
    threshold are multiplied so that its logits shrink by eta = threshold / S."""

    qk_clip_threshold: float = 100.0
    qk_clip_alpha: float = 0.5
    """Exponent alpha: weights of q are multiplied by eta^alpha, those of k by eta^(1 - alpha)."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of fp16 runs; see `optim/loss_scale.py`."""

    loss_scale: float | None = None
    """Constant loss scale; None means dynamic loss scaling."""
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000.0
    """Number of steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Number of overflows after which the scale is halved."""

    @property
    def most_overflows(self) -> int:
        """Number of consecutive overflows that reduce the initial scale to the minimum."""
        return self.hysteresis + ceil(log2(max(self.initial_loss_scale / self.min_loss_scale, 1.0)))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule and its hyperparameters. AdamW (arXiv 1711.05101) has decoupled weight decay."""

    optimizer: str = "adam"
    """Name of the update rule in `config.registry.UPDATE_RULES` (`--optimizer`)."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    lion_beta1: float = 0.95
    """Lion: weight of the momentum in its interpolation with the gradient, whose sign is the update."""
    lion_beta2: float = 0.98
    clip_grad: float = 1.0
    """Maximum global L2 norm of the gradient; 0 disables clipping."""
    apply_wd_to_qk_layernorm: bool = False
    """Applies weight decay to q and k norms (`--apply-wd-to-qk-layernorm`)."""
    decoupled_lr: float | None = None
    """Maximum learning rate of embedding and output layer; None means `LRConfig.max_lr`."""
    decoupled_min_lr: float | None = None
    muon: MuonConfig = MuonConfig()
    qk_clip: QKClipConfig | None = None
    loss_scaling: LossScaleConfig | None = None
    """Loss scaling of fp16 runs; None if the loss is not scaled."""
    offload: OptimizerOffloadConfig = OptimizerOffloadConfig()
    overlap_optimizer_step: bool = False
    """Updates weights bucket by bucket, overlapped with the next forward (`--overlap-optimizer-step`)."""


@dataclass(frozen=True, kw_only=True)
class LRConfig:
    """Schedules of learning rate and weight decay. Lengths are in samples (sequences)."""

    max_lr: float
    """Maximum learning rate, reached at the end of warm-up (`--lr`)."""
    min_lr: float = 0.0
    init_lr: float = 0.0
    """Learning rate at the start of warm-up (`--lr-warmup-init`)."""
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    warmup_samples: float = 0
    """Length of the linear warm-up; fractional if computed as `--lr-warmup-fraction` times `decay_samples`."""
    decay_samples: int
    """Samples from the start of the run until `min_lr` is reached, including warm-up."""
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of style WSD (`--lr-wsd-decay-style`)."""
    wsd_decay_samples: int | None = None
    """Length of the final decay of style WSD, in samples; None for other styles."""
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Curve of the weight decay between its start value and its end value (`--weight-decay-incr-style`)."""
    weight_decay_samples: int | None = None
    """Number of samples over which weight decay changes. Flags set it to the run length; None means `decay_samples`."""
    override_opt_param_scheduler: bool = False
    """Uses the command line's schedule if the checkpoint has another one (`--override-opt-param-scheduler`)."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Uses the checkpoint's schedule if the command line has another one (`--use-checkpoint-opt-param-scheduler`)."""
