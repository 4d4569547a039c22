"""Floating-point operations of a training step, counted from the model spec, and what a device could do at best."""

from collections import Counter
from dataclasses import dataclass, fields
from typing import Literal

from megatron_moe.config.attention import (
    AttentionConfig,
    CoreAttentionConfig,
    MLAConfig,
)
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MLPConfig, MoEConfig
from megatron_moe.config.precision import FloatName

Convention = Literal["causal", "full"]
"""causal: query-key pairs that the mask hides are not counted. full: all S^2 pairs of a sequence are."""

_PER_MULTIPLY_ADD = 6
"""2 operations, in forward, input gradient and weight gradient."""


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Operations of forward and backward by kind. Recomputed forwards do not count: they are no progress."""

    attention: int = 0
    """Projections."""
    core_attention: int = 0
    """q k^T and the product with v."""
    dense_mlp: int = 0
    experts: int = 0
    """Routed experts as if every token visited exactly `topk` of them, with their latent projections."""
    shared: int = 0
    mtp: int = 0
    """Multi-token prediction: its layers and projections, without its use of the head."""
    head: int = 0
    """Logits, once for the next token and once per depth of multi-token prediction."""

    def __add__(self, other: "FlopCount") -> "FlopCount":
        return FlopCount(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def count_flops(
    model: ModelConfig, num_sequences: int, seq_length: int, convention: Convention = "causal"
) -> FlopCount:
    """Operations of one step over `num_sequences` sequences of `seq_length` tokens.

    With "causal" this is the formula behind Megatron's "throughput per GPU": matrix products only; no router, norms,
    embedding lookup, padding or recompute; half of S^2 per attention. It differs where Megatron counts what is not
    computed: keys outside a sliding window.
    """
    count = FlopCount()
    for layer, times in Counter(model.layers).items():
        of_layer = count_layer_flops(layer, seq_length, convention)
        count += FlopCount(**{f.name: times * getattr(of_layer, f.name) for f in fields(FlopCount)})
    depths = model.mtp.num_layers if model.mtp else 0
    head = seq_length * model.hidden_size * model.vocab_size * (1 + depths) * _PER_MULTIPLY_ADD
    count += FlopCount(head=head, mtp=depths * _mtp_depth(model, seq_length, convention))
    return FlopCount(**{f.name: num_sequences * getattr(count, f.name) for f in fields(count)})


def flops_per_step(model: ModelConfig, num_sequences: int, seq_length: int, convention: Convention = "causal") -> int:
    """Total of `count_flops`: what throughput and MFU are computed from."""
    return count_flops(model, num_sequences, seq_length, convention).total


def _mtp_depth(model: ModelConfig, seq_length: int, convention: Convention) -> int:
    """One more layer of the last kind, the projection [H, 2H], and (Megatron counts them here) three norms."""
    hidden = model.hidden_size
    own = seq_length * (2 * hidden * hidden + 3 * hidden) * _PER_MULTIPLY_ADD
    return own + count_layer_flops(model.layers[-1], seq_length, convention).total


def count_layer_flops(layer: LayerConfig, seq_length: int, convention: Convention = "causal") -> FlopCount:
    """Operations of one layer for one sequence."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    projections = _mla(mixer) if isinstance(mixer, MLAConfig) else _attention(mixer)
    attention = FlopCount(
        attention=seq_length * projections * _PER_MULTIPLY_ADD,
        core_attention=_core_width(mixer) * _twice_pairs(mixer.core, seq_length, convention) * _PER_MULTIPLY_ADD // 2,
    )
    per_token = seq_length * _PER_MULTIPLY_ADD
    if isinstance(feed_forward, MLPConfig):
        return attention + FlopCount(dense_mlp=per_token * _mlp(feed_forward))
    shared = _mlp(feed_forward.shared.mlp) if feed_forward.shared else 0
    return attention + FlopCount(experts=per_token * _experts(feed_forward), shared=per_token * shared)


def _attention(config: AttentionConfig) -> int:
    """Multiply-adds per token of the projections."""
    gate = config.q_width if config.output_gate else 0
    return config.hidden_size * (config.q_width + 2 * config.kv_width + gate) + config.q_width * config.hidden_size


def _mla(config: MLAConfig) -> int:
    """Multiply-adds per token of the projections; the norms of the compressed q and kv count as in Megatron."""
    norm = 1 if config.qk_norm else 0
    q_width = config.num_heads * config.q_head_dim
    if config.q_lora_rank is None:
        query = config.hidden_size * q_width
    else:
        query = config.q_lora_rank * (config.hidden_size + q_width + norm)
    up_width = config.num_heads * (config.qk_head_dim + config.v_head_dim)
    key_value = config.kv_lora_rank * (config.hidden_size + up_width + norm) + config.hidden_size * config.qk_rope_dim
    return query + key_value + config.num_heads * config.v_head_dim * config.hidden_size


def _core_width(mixer: AttentionConfig | MLAConfig) -> int:
    """Multiply-adds per query-key pair: q k^T over the q width of all heads, then the product with v."""
    if isinstance(mixer, MLAConfig):
        return mixer.num_heads * (mixer.q_head_dim + mixer.v_head_dim)
    return 2 * mixer.q_width


def _twice_pairs(core: CoreAttentionConfig, seq_length: int, convention: Convention) -> int:
    """Twice the query-key pairs of one sequence, as a continuous area: S^2 / 2 under the causal mask, and
    w S - w^2 / 2 with a window of w tokens."""
    if convention == "full" or not core.causal:
        return 2 * seq_length * seq_length
    left = core.window[0] if core.window else -1
    window = seq_length if left < 0 else min(left + 1, seq_length)
    return 2 * window * seq_length - window * window


def _mlp(config: MLPConfig) -> int:
    return (config.activation.fan + 1) * config.ffn_hidden_size * config.hidden_size


def _experts(config: MoEConfig) -> int:
    experts = config.experts
    routed = config.router.topk * (experts.activation.fan + 1) * experts.ffn_hidden_size * experts.hidden_size
    latent = 2 * config.router.hidden_size * config.latent_size if config.latent_size else 0
    return routed + latent


@dataclass(frozen=True)
class _Device:
    """Dense TFLOP/s of a device whose name contains `name`; None: no such units, or not published."""

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
"""From NVIDIA's data sheets: A100, H100 (SXM, PCIe, NVL), H200, HGX B200 and B300, GB200 NVL72, Vera
Rubin NVL72 (preliminary), L40S, V100. Sheets that print tensor-core figures with 2:4 sparsity are halved. fp32 is the
plain rate: torch does not use TF32 unless told to. The first entry that fits counts."""


def peak_flops(device_name: str, dtype: FloatName) -> float | None:
    """Best dense FLOP/s of a device, by the name that `torch.cuda.get_device_name` gives.

    None for a CPU, an unknown device or a dtype that it has no units for: then no MFU is reported.
    """
    for device in _DEVICES:
        if device.name in device_name:
            tflops: float | None = getattr(device, dtype)
            return None if tflops is None else tflops * 1e12
    return None
