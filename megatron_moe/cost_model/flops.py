"""Floating-point operations of a training step, and peak rates of devices."""

from collections import Counter
from dataclasses import dataclass

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.costs import CostSum
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.precision import FloatName

_PER_MULTIPLY_ADD = 6
"""Training FLOPs per multiply-add of a GEMM: 2 in forward, 2 for the input gradient, 2 for the weight gradient."""


@dataclass(frozen=True, kw_only=True)
class FlopCount(CostSum[int]):
    """FLOPs of forward and backward by part of the model, excluding recompute."""

    attention: int = 0
    """Linear projections of attention."""
    core_attention: int = 0
    """The two GEMMs of attention: queries times keys, and probabilities times values."""
    dense_mlp: int = 0
    experts: int = 0
    """Routed experts (`topk` per token) and the projections into and out of their latent space."""
    shared: int = 0
    mtp: int = 0
    """Layers and input projections of multi-token prediction. The logits of multi-token prediction are in `head`."""
    head: int = 0
    """Projection to logits, for the next token and for every depth of multi-token prediction."""


def count_flops(model: ModelConfig, num_sequences: int, seq_length: int) -> FlopCount:
    """FLOPs of one step over `num_sequences` sequences of `seq_length` tokens.

    The formula is Megatron's for "throughput per GPU", but excludes keys outside a sliding window. All GEMMs except the
    router's are counted, and also the norms of MLA latents and of multi-token prediction. Recompute is not counted.
    Causal attention has S^2 / 2 query-key pairs.
    """
    head = seq_length * model.hidden_size * model.vocab_size * (1 + model.num_mtp) * _PER_MULTIPLY_ADD
    count = FlopCount(head=head, mtp=model.num_mtp * _mtp_depth(model, seq_length))
    for layer, times in Counter(model.layers).items():
        count += count_layer_flops(layer, seq_length) * times
    return count * num_sequences


def flops_per_step(model: ModelConfig, num_sequences: int, seq_length: int) -> int:
    """FLOPs of one step over all parts of the model, from which throughput and MFU are computed."""
    return count_flops(model, num_sequences, seq_length).total


def _mtp_depth(model: ModelConfig, seq_length: int) -> int:
    """FLOPs of one MTP depth for one sequence: a decoder layer, the projection [H, 2H] and, as in Megatron, 3 norms."""
    hidden = model.hidden_size
    own = seq_length * (2 * hidden * hidden + 3 * hidden) * _PER_MULTIPLY_ADD
    return own + count_layer_flops(model.layers[-1], seq_length).total


def count_layer_flops(layer: LayerConfig, seq_length: int) -> FlopCount:
    """FLOPs of one layer for one sequence, forward and backward."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    per_token = seq_length * _PER_MULTIPLY_ADD
    projections = mixer.matrix_elements
    if isinstance(mixer, MLAConfig) and mixer.qk_norm:  # Megatron counts the norms of the compressed q and kv
        projections += mixer.kv_lora_rank + (mixer.q_lora_rank or 0)
    pairs = _doubled_num_pairs(mixer.core, seq_length)
    attention = FlopCount(
        attention=per_token * projections,
        core_attention=(mixer.q_width + mixer.out_width) * pairs * _PER_MULTIPLY_ADD // 2,
    )
    if isinstance(feed_forward, MLPConfig):
        return attention + FlopCount(dense_mlp=per_token * feed_forward.matrix_elements)
    experts = feed_forward.router.topk * feed_forward.experts.matrix_elements + feed_forward.latent_elements
    shared = feed_forward.shared.mlp.matrix_elements if feed_forward.shared else 0
    return attention + FlopCount(experts=per_token * experts, shared=per_token * shared)


def _doubled_num_pairs(core: CoreAttentionConfig, seq_length: int) -> int:
    """Twice the number of query-key pairs of one sequence, as an integer. The number of pairs is approximated by an
    area: S^2 / 2 for causal attention, and w S - w^2 / 2 with a window of w tokens."""
    if not core.causal:
        return 2 * seq_length * seq_length
    left = core.window[0] if core.window else -1
    window = seq_length if left < 0 else min(left + 1, seq_length)
    return 2 * window * seq_length - window * window


@dataclass(frozen=True)
class _Device:
    """Peak dense TFLOP/s of devices whose name contains `name`; None: format not supported or rate not published."""

    name: str
    fp64: float | None
    fp32: float | None
    fp16: float
    bf16: float | None


_DEVICES = (
    _Device("VR200", 33.0, 130.0, 4000.0, 4000.0),
    _Device("GB300", None, None, 2500.0, 2500.0),
    _Device("GB200", 40.0, 80.0, 2500.0, 2500.0),
    _Device("B300", 1.25, 75.0, 2250.0, 2250.0),
    _Device("B200", 37.0, 75.0, 2250.0, 2250.0),
    _Device("GH200", 67.0, 67.0, 989.0, 989.0),
    _Device("H200 NVL", 60.0, 60.0, 835.5, 835.5),
    _Device("H200", 67.0, 67.0, 989.0, 989.0),
    _Device("H100 NVL", 60.0, 60.0, 835.5, 835.5),
    _Device("H100 PCIe", 51.0, 51.0, 756.0, 756.0),
    _Device("H100", 67.0, 67.0, 989.0, 989.0),
    _Device("H800", 1.0, 67.0, 989.0, 989.0),
    _Device("H20", 1.0, 44.0, 148.0, 148.0),
    _Device("A100", 19.5, 19.5, 312.0, 312.0),
    _Device("A800", 9.7, 19.5, 312.0, 312.0),
    _Device("L40S", None, 91.6, 362.0, 362.0),
    _Device("V100", 7.8, 15.7, 125.0, None),
)
"""Rates from NVIDIA's data sheets (VR200: preliminary). Rates published only for 2:4 sparsity are halved. fp32 rates
are without TF32, which torch does not use by default. If several entries match a device name, the first one is used."""


def peak_flops(device_name: str, dtype: FloatName) -> float | None:
    """Peak dense FLOP/s of a device; None for a CPU, an unknown device or an unsupported dtype. `device_name`: name as
    returned by `torch.cuda.get_device_name`."""
    for device in _DEVICES:
        if device.name in device_name:
            tflops: float | None = getattr(device, dtype)
            return None if tflops is None else tflops * 1e12
    return None
