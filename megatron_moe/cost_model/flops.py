"""Floating-point operations of a training step, and peak rates of devices."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from megatron_moe.config.component import UNSHARDED, ParamSpec
from megatron_moe.config.costs import FORWARD_FLOPS, TRAINING_FLOPS, FlopCount
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.precision import FloatName

_PROJECTIONS = MappingProxyType(
    {**{name: name for name in ("attention", "dense_mlp", "experts", "shared", "connections")}, "latent": "experts"}
)
"""Maps each field of `ParamCount` to the field of `FlopCount` that counts the GEMMs with its matrices."""


def count_flops(model: ModelConfig, num_sequences: int, seq_length: int) -> FlopCount:
    """FLOPs of one step over `num_sequences` sequences of `seq_length` tokens.

    The formula is Megatron's for "throughput per GPU", but excludes keys outside a sliding window. Counted are all
    GEMMs except those of the router and of the shared experts' gate, the convolution and recurrence of linear
    attention, and the norms of MLA latents and of multi-token prediction. Recompute is not counted. Causal attention
    has S^2 / 2 query-key pairs.
    """
    head = seq_length * model.hidden_size * model.vocab_size * (1 + model.num_mtp) * TRAINING_FLOPS
    count = FlopCount(head=head, mtp=model.num_mtp * _mtp_depth(model, seq_length)) + _streams_head(model, seq_length)
    for layer, times in Counter(model.layers).items():
        count += count_layer_flops(layer, seq_length) * times
    return count * num_sequences


def flops_per_step(model: ModelConfig, num_sequences: float, seq_length: int) -> float:
    """FLOPs of one step over all parts of the model, from which throughput and MFU are computed."""
    return count_flops(model, 1, seq_length).total * num_sequences


def _mtp_depth(model: ModelConfig, seq_length: int) -> int:
    """FLOPs of one MTP depth for one sequence: a decoder layer, the projection [H, 2H] of every residual stream and, as
    in Megatron, 3 norms."""
    hidden = model.hidden_size
    own = seq_length * (2 * hidden * hidden * model.residual.num_streams + 3 * hidden) * TRAINING_FLOPS
    return own + count_layer_flops(model.mtp_layer, seq_length).total + _streams_head(model, seq_length).total


def _streams_head(model: ModelConfig, seq_length: int) -> FlopCount:
    """FLOPs of the hyper-connection head, which reduces several residual streams to one, for one sequence."""
    return gemm_flops(model.final_norm_parameters(UNSHARDED), seq_length)


def count_layer_flops(layer: LayerConfig, seq_length: int) -> FlopCount:
    """FLOPs of one layer for one sequence, forward and backward."""
    projections = gemm_flops(layer.parameters(UNSHARDED), seq_length)
    return projections + layer.mixer.flops(seq_length) + layer.feed_forward.flops(seq_length)


def gemm_flops(parameters: Iterable[ParamSpec], num_tokens: int, *, forward_only: bool = False) -> FlopCount:
    """FLOPs of the GEMMs of `num_tokens` tokens with the weight matrices among `parameters`, in forward and backward,
    or in forward only if `forward_only`."""
    found: Counter[str] = Counter()
    for spec in parameters:
        if spec.meta.role == "matrix":
            per_element = FORWARD_FLOPS if forward_only else spec.flops_per_element
            found[_PROJECTIONS[spec.counted]] += spec.active_elements * num_tokens * per_element
    return FlopCount(**found)


@dataclass(frozen=True)
class _Device:
    """Peak dense TFLOP/s of devices whose name contains `name`; None if the format is not supported or the rate not
    published."""

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
    _Device("RTX 5090", None, 104.8, 209.5, 209.5),
    _Device("RTX 4090", None, 82.6, 165.2, 165.2),
    _Device("RTX 3090", None, 35.6, 71.0, 71.0),
    _Device("RTX A6000", None, 38.7, 154.8, 154.8),
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
