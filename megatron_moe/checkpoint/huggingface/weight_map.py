"""Mapping between our parameters and Hugging Face tensors, in both directions, as tables of rules by model family.

A rule contains the name of our parameter, the names of its Hugging Face tensors, and the transform between them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.moe import MoEConfig


@dataclass(frozen=True)
class Transform:
    """Bijection between one of our tensors and the Hugging Face tensors that it consists of."""

    from_hf: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], Sequence[Tensor]]


COPY = Transform(lambda tensors: tensors[0], lambda tensor: [tensor])
GATE_UP = Transform(lambda tensors: torch.cat(list(tensors)), lambda tensor: tensor.chunk(2))
"""Hugging Face gate [F, ...] and up [F, ...] <-> our [2F, ...], gate rows first."""
TRANSPOSED = Transform(lambda tensors: tensors[0].transpose(1, 2), lambda tensor: [tensor.transpose(1, 2)])
"""Expert matrices: Hugging Face [E, I, O] <-> our [E, O, I], with I input and O output features."""


def _halves_of_interleaved(tensors: Sequence[Tensor]) -> Tensor:
    halves = torch.cat([tensors[0][..., 0::2], tensors[0][..., 1::2]], dim=-1)
    return halves.transpose(1, 2) if halves.dim() == 3 else halves


def _interleaved_halves(tensor: Tensor) -> list[Tensor]:
    halves = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    return [torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)]


INTERLEAVED_GATE_UP = Transform(_halves_of_interleaved, _interleaved_halves)
"""GPT-OSS experts: gate and up interleaved along the last dim <-> our gate half, followed by the up half.

Weights [E, H, 2F] <-> [E, 2F, H], biases [E, 2F] <-> [E, 2F].
"""


def query_key_value(num_groups: int, heads_per_group: int) -> Transform:
    """Hugging Face q, k and v matrices <-> our fused matrix. Its rows are, for each query group: q heads, k, v."""

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        parts = [part.reshape(num_groups, -1, *part.shape[1:]) for part in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def to_hf(tensor: Tensor) -> list[Tensor]:
        groups = tensor.reshape(num_groups, heads_per_group + 2, -1, *tensor.shape[1:])
        return [part.flatten(0, 2) for part in groups.split([heads_per_group, 1, 1], dim=1)]

    return Transform(from_hf, to_hf)


def padded_rows(num_rows: int, num_padded: int) -> Transform:
    """Vocabulary table: Hugging Face [num_rows, ...] <-> our [num_padded, ...] with zero rows at the end."""

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0], tensors[0].new_zeros(num_padded - num_rows, *tensors[0].shape[1:])])

    return Transform(from_hf, lambda tensor: [tensor[:num_rows]])


@dataclass(frozen=True)
class NameRule:
    """Rule for one parameter. Names are relative to the layer, or to the model for parameters outside layers. If
    `hf_names` contain the placeholder `{e}` (expert index), the rule maps each expert's slice of our stacked tensor."""

    name: str
    hf_names: tuple[str, ...]
    transform: Transform | None = COPY
    """Transform of the tensors. None selects `query_key_value` with the head counts of the layer."""


@dataclass(frozen=True)
class WeightMapping:
    """One parameter, or one expert's slice of it, and the Hugging Face tensors that it consists of."""

    name: str
    expert: int | None
    hf_names: tuple[str, ...]
    transform: Transform


def _weight_and_bias(name: str, *hf_names: str, transform: Transform | None = COPY) -> tuple[NameRule, ...]:
    return tuple(
        NameRule(f"{name}.{kind}", tuple(f"{hf_name}.{kind}" for hf_name in hf_names), transform)
        for kind in ("weight", "bias")
    )


_NORMS = (
    NameRule("input_layernorm.weight", ("input_layernorm.weight",)),
    NameRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)

_GROUPED_QUERY = (
    *_weight_and_bias("self_attention.linear_qkv", *(f"self_attn.{part}_proj" for part in "qkv"), transform=None),
    *_weight_and_bias("self_attention.linear_proj", "self_attn.o_proj"),
    NameRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    NameRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    NameRule("self_attention.sinks", ("self_attn.sinks",)),
)

_LATENT = (
    NameRule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",)),
    NameRule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    NameRule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    NameRule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",)),
    NameRule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    NameRule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    NameRule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",)),
    NameRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
)


def _mlp(
    name: str, hf_name: str, matrices: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[NameRule, ...]:
    gate, up, down = (f"{hf_name}.{matrix}.weight" for matrix in matrices)
    return (NameRule(f"{name}.linear_fc1.weight", (gate, up), GATE_UP), NameRule(f"{name}.linear_fc2.weight", (down,)))


_DENSE = _mlp("mlp", "mlp")
_EXPERTS = (NameRule("mlp.router.weight", ("mlp.gate.weight",)), *_mlp("mlp.experts", "mlp.experts.{e}"))
_SHARED_AND_BIAS = (
    *_mlp("mlp.shared_experts", "mlp.shared_experts"),
    NameRule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
)

_MIXTRAL = (
    *_NORMS,
    *_GROUPED_QUERY,
    NameRule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    *_mlp("mlp.experts", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
)
_QWEN_AND_OLMOE = (
    *_NORMS,
    *_GROUPED_QUERY,
    *_DENSE,
    *_EXPERTS,
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    NameRule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)
_GLM = (*_NORMS, *_GROUPED_QUERY, *_DENSE, *_EXPERTS, *_SHARED_AND_BIAS)
_DEEPSEEK = (*_NORMS, *_LATENT, *_DENSE, *_EXPERTS, *_SHARED_AND_BIAS)
_GPT_OSS = (
    *_NORMS,
    *_GROUPED_QUERY,
    *_weight_and_bias("mlp.router", "mlp.router"),
    NameRule("mlp.experts.linear_fc1.weight", ("mlp.experts.gate_up_proj",), INTERLEAVED_GATE_UP),
    NameRule("mlp.experts.linear_fc1.bias", ("mlp.experts.gate_up_proj_bias",), INTERLEAVED_GATE_UP),
    NameRule("mlp.experts.linear_fc2.weight", ("mlp.experts.down_proj",), TRANSPOSED),
    NameRule("mlp.experts.linear_fc2.bias", ("mlp.experts.down_proj_bias",)),
)

_LAYER_RULES: Mapping[str, tuple[NameRule, ...]] = MappingProxyType(
    {
        "mixtral": _MIXTRAL,
        **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _QWEN_AND_OLMOE),
        "gpt_oss": _GPT_OSS,
        "glm4_moe": _GLM,
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    }
)
"""Rules for the parameters of a layer, by `model_type` of config.json."""

_MODEL_RULES = (
    NameRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    NameRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    NameRule("output_layer.weight", ("lm_head.weight",)),
)
_VOCABULARY = frozenset(("embedding.word_embeddings.weight", "output_layer.weight"))

_MTP = (
    NameRule("enorm.weight", ("enorm.weight",)),
    NameRule("hnorm.weight", ("hnorm.weight",)),
    NameRule("eh_proj.weight", ("eh_proj.weight",)),
    NameRule("final_layernorm.weight", ("shared_head.norm.weight",)),
)
"""MTP parameters outside the transformer layer. In Hugging Face names, MTP layer i has number `num_layers + i`."""

MTP_EMBEDDING = "embed_tokens.weight"
MTP_HEAD = "shared_head.head.weight"
"""Name of an MTP layer's copy of the output head in Hugging Face folders, relative to the name of the layer."""

_LAYER_NAME = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.transformer_layer\.(?P<rest>.+)")
_MTP_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MODEL_NAME = re.compile(r"(?P<rest>.+)")


def map_names(
    model_type: str, names: Iterable[str], model: ModelConfig, published: ModelConfig
) -> tuple[list[WeightMapping], list[str]]:
    """Maps parameter and buffer names of `model` to Hugging Face. Returns the mappings and the names without a rule.

    `published` is the config of the Hugging Face folder, whose vocabulary is not padded.
    """
    rules = _by_name(_LAYER_RULES[model_type])
    num_layers = len(published.layers)
    tables = (
        (_LAYER_NAME, rules, 0),
        (_MTP_LAYER_NAME, rules, num_layers),
        (_MTP_NAME, _by_name(_MTP), num_layers),
        (_MODEL_NAME, _by_name(_MODEL_RULES), 0),
    )
    mappings: list[WeightMapping] = []
    unknown: list[str] = []
    for name in names:
        found = _find(name, tables)
        if found is None:
            unknown.append(name)
        else:
            mappings += _expand(name, *found, model, published)
    return mappings, unknown


def _by_name(rules: Iterable[NameRule]) -> dict[str, NameRule]:
    return {rule.name: rule for rule in rules}


def _find(
    name: str, tables: Iterable[tuple[re.Pattern[str], dict[str, NameRule], int]]
) -> tuple[NameRule, int | None] | None:
    """Returns the rule for a name and the Hugging Face layer number (None outside layers); None if no rule matches."""
    for pattern, rules, offset in tables:
        match = pattern.fullmatch(name)
        if match and match["rest"] in rules:
            layer = match.groupdict().get("layer")
            return rules[match["rest"]], None if layer is None else int(layer) + offset
    return None


def _expand(
    name: str, rule: NameRule, layer: int | None, model: ModelConfig, published: ModelConfig
) -> list[WeightMapping]:
    if layer is None:
        vocabulary = padded_rows(published.vocab_size, model.vocab_size)
        return [WeightMapping(name, None, rule.hf_names, vocabulary if name in _VOCABULARY else COPY)]
    config = model.layers[min(layer, len(model.layers) - 1)]  # MTP layers have the config of the last layer
    transform = rule.transform
    if transform is None:
        assert isinstance(config.mixer, AttentionConfig), f"layer {layer} is not a q, k, v attention: {config.mixer}"
        groups = config.mixer.num_query_groups
        transform = query_key_value(groups, config.mixer.num_heads // groups)
    mapping = WeightMapping(name, None, tuple(f"model.layers.{layer}.{part}" for part in rule.hf_names), transform)
    if "{e}" not in rule.hf_names[0]:
        return [mapping]
    assert isinstance(config.feed_forward, MoEConfig), f"layer {layer} has no experts: {config.feed_forward}"
    return [
        replace(mapping, expert=expert, hf_names=tuple(part.replace("{e}", str(expert)) for part in mapping.hf_names))
        for expert in range(config.feed_forward.experts.num_experts)
    ]
