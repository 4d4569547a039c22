"""Names of our parameters in Megatron checkpoints.

Megatron stacks identical layers along a new dim 0 and omits the layer number from the name. Transformer Engine fuses a
norm into the linear layer that follows it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER = re.compile(r"(?P<depth>mtp\.layers\.\d+)\.transformer_layer\.(?P<rest>.+)")

_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
        "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
        "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
        "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
        "mlp.experts.linear_fc1.weight": ("mlp.experts.experts.linear_fc1.weight",),
        "mlp.experts.linear_fc2.weight": ("mlp.experts.experts.linear_fc2.weight",),
    }
)
"""Alternative names of a layer's parameters."""


@dataclass(frozen=True)
class Location:
    """Megatron tensor that holds one of our parameters."""

    name: str
    layer: int | None = None
    """Index along dim 0 if the tensor stacks all layers; else None."""


def candidate_locations(name: str) -> Iterator[Location]:
    """Yields the tensors in which Megatron may store a parameter."""
    decoder, mtp = _LAYER.fullmatch(name), _MTP_LAYER.fullmatch(name)
    if decoder is not None:
        for rest in (decoder["rest"], *_ALIASES.get(decoder["rest"], ())):
            yield Location(f"decoder.layers.{decoder['layer']}.{rest}")
            yield Location(f"decoder.layers.{rest}", int(decoder["layer"]))
    elif mtp is not None:
        for rest in (mtp["rest"], *_ALIASES.get(mtp["rest"], ())):
            for inner in ("transformer_layer", "mtp_model_layer"):
                yield Location(f"{mtp['depth']}.{inner}.{rest}")
    else:
        yield Location(name)


QUERY_NORM = "self_attention.linear_q_proj.layer_norm_weight"
"""Name suffix of a norm that Megatron-Core adds to multi-latent attention without a q latent, and our models lack."""

STATE = re.compile(r"(chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)")
"""Key of per-parameter optimizer state."""

KINDS: Mapping[str, str] = MappingProxyType(
    {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
)
"""Our kind of optimizer state by Megatron's."""

IGNORED = re.compile(r".*(_extra_state|rng_state).*|.*\.rotary_pos_emb\.inv_freq|.*local_tokens_per_expert")
"""Tensors that are not parameters: Transformer Engine and RNG state, RoPE tables, counters."""
