"""Our parameter names and Megatron's, which differ in few places.

Where Megatron's layers are all alike, it stacks them along a first dim and leaves their number out of the name. With
Transformer Engine it keeps a norm inside the matrix that follows it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_NUMBERED = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER = re.compile(r"(?P<depth>mtp\.layers\.\d+)\.transformer_layer\.(?P<rest>.+)")

_ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
        "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
        "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
        "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
        "mlp.experts.linear_fc1.weight": ("mlp.experts.experts.linear_fc1.weight",),
        "mlp.experts.linear_fc2.weight": ("mlp.experts.experts.linear_fc2.weight",),
    }
)
"""Other names of a layer's parameters."""


@dataclass(frozen=True)
class Place:
    """Where a parameter of ours is."""

    name: str
    layer: int | None = None
    """Index along the first dim of a stack of layers; None: the tensor is the parameter."""


def places(ours: str) -> Iterator[Place]:
    """Where Megatron may keep the parameter `ours`."""
    decoder, prediction = _NUMBERED.fullmatch(ours), _MTP_LAYER.fullmatch(ours)
    if decoder is not None:
        for rest in (decoder["rest"], *_ALSO.get(decoder["rest"], ())):
            yield Place(f"decoder.layers.{decoder['layer']}.{rest}")
            yield Place(f"decoder.layers.{rest}", int(decoder["layer"]))
    elif prediction is not None:
        for rest in (prediction["rest"], *_ALSO.get(prediction["rest"], ())):
            for inner in ("transformer_layer", "mtp_model_layer"):
                yield Place(f"{prediction['depth']}.{inner}.{rest}")
    else:
        yield Place(ours)


QUERY_NORM = "self_attention.linear_q_proj.layer_norm_weight"
"""End of the name of a norm that Megatron-Core adds to multi-latent attention without a query latent. Models here have
no such parameter."""

STATE = re.compile(r"(chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)")
"""Key of an optimizer's state of one parameter."""

KINDS: Mapping[str, str] = MappingProxyType(
    {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
)
"""Kinds of state, theirs to ours."""

PASSED_OVER = re.compile(r".*(_extra_state|rng_state).*|.*\.rotary_pos_emb\.inv_freq|.*local_tokens_per_expert")
"""What is no parameter: states of Transformer Engine and of random number generators, counters."""
