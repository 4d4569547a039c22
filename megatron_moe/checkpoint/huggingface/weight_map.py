"""Invertible mapping of parameter names and layouts to Hugging Face, as tables of rules by model family.

A rule names one of our parameters, the Hugging Face tensors that it consists of, and the transform between them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MoEConfig


class Transform(Protocol):
    """Bijection between one of our tensors and the Hugging Face tensors it consists of."""

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def to_hf(self, tensor: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class CopyRule:
    """Renamed tensor."""

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class GateUp:
    """gate [F, ...] and up [F, ...] <-> [2F, ...], gate rows first."""

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(2))


@dataclass(frozen=True)
class QueryKeyValue:
    """q [N D, ...], k [G D, ...], v [G D, ...] <-> rows grouped by query group: its q heads, its k, its v."""

    num_groups: int
    heads_per_group: int

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [part.reshape(self.num_groups, -1, *part.shape[1:]) for part in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        groups = tensor.reshape(self.num_groups, self.heads_per_group + 2, -1, *tensor.shape[1:])
        q, k, v = groups.split([self.heads_per_group, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in (q, k, v)]


@dataclass(frozen=True)
class Transposed:
    """Expert matrices [E, I, O] <-> [E, O, I]."""

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.transpose(1, 2)]


@dataclass(frozen=True)
class InterleavedGateUp:
    """GPT-OSS: gate and up interleaved along the last dim <-> gate half first.

    Weights [E, H, 2F] <-> [E, 2F, H], biases [E, 2F] <-> [E, 2F].
    """

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        halves = torch.cat([tensors[0][..., 0::2], tensors[0][..., 1::2]], dim=-1)
        return halves.transpose(1, 2) if halves.dim() == 3 else halves

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        halves = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        return [torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)]


@dataclass(frozen=True)
class PaddedRows:
    """Vocabulary table [num_rows, ...] <-> [padded_rows, ...] with zero rows at the end."""

    num_rows: int
    padded_rows: int

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        table = tensors[0]
        return torch.cat([table, table.new_zeros(self.padded_rows - self.num_rows, *table.shape[1:])])

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor[: self.num_rows]]


@dataclass(frozen=True)
class NameRule:
    """Rule for one parameter, by the end of its name.

    With the expert number `{e}` in `hf_names`, the rule maps each expert's slice of our stacked tensor.
    """

    name: str
    hf_names: tuple[str, ...]
    transform: Transform | None = CopyRule()
    """None: `QueryKeyValue` with the sizes of the layer's attention."""


@dataclass(frozen=True)
class WeightMapping:
    """One parameter, or one expert's slice of it, and the Hugging Face tensors that it consists of."""

    name: str
    expert: int | None
    hf_names: tuple[str, ...]
    transform: Transform


def _weight_and_bias(name: str, *hf_names: str, transform: Transform | None = CopyRule()) -> tuple[NameRule, ...]:
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


def _mlp(name: str, hf_name: str) -> tuple[NameRule, ...]:
    gate, up, down = (f"{hf_name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (NameRule(f"{name}.linear_fc1.weight", (gate, up), GateUp()), NameRule(f"{name}.linear_fc2.weight", (down,)))


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
    NameRule(
        "mlp.experts.linear_fc1.weight",
        ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        GateUp(),
    ),
    NameRule("mlp.experts.linear_fc2.weight", ("block_sparse_moe.experts.{e}.w2.weight",)),
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
    NameRule("mlp.experts.linear_fc1.weight", ("mlp.experts.gate_up_proj",), InterleavedGateUp()),
    NameRule("mlp.experts.linear_fc1.bias", ("mlp.experts.gate_up_proj_bias",), InterleavedGateUp()),
    NameRule("mlp.experts.linear_fc2.weight", ("mlp.experts.down_proj",), Transposed()),
    NameRule("mlp.experts.linear_fc2.bias", ("mlp.experts.down_proj_bias",)),
)

_LAYER_RULES = (
    ("mixtral", _MIXTRAL),
    ("qwen2_moe", _QWEN_AND_OLMOE),
    ("qwen3_moe", _QWEN_AND_OLMOE),
    ("olmoe", _QWEN_AND_OLMOE),
    ("gpt_oss", _GPT_OSS),
    ("glm4_moe", _GLM),
    ("deepseek_v2", _DEEPSEEK),
    ("deepseek_v3", _DEEPSEEK),
    ("kimi_k2", _DEEPSEEK),
)
"""Rules of a layer's parameters by `model_type` of config.json."""

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
"""Rules of an MTP depth outside its transformer layer (DeepSeek-V3, GLM-4.5), layer `num_layers + depth` there."""

MTP_EMBEDDING = "embed_tokens.weight"
MTP_HEAD = "shared_head.head.weight"
"""Copies of the shared embedding and output head in published MTP layers."""

_LAYER_NAME = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.transformer_layer\.(?P<rest>.+)")
_MTP_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MODEL_NAME = re.compile(r"(?P<rest>.+)")


def map_names(
    model_type: str, names: Iterable[str], model: ModelConfig, published: ModelConfig
) -> tuple[list[WeightMapping], list[str]]:
    """Maps parameter and buffer names of `model`. Returns the mappings and the names without a rule.

    `published` is the config of the Hugging Face folder, whose vocabulary is not padded.
    """
    rules = _by_name(next(table for name, table in _LAYER_RULES if name == model_type))
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
    """Rule of a name and its Hugging Face layer number, if any."""
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
        if name not in _VOCABULARY:
            return [WeightMapping(name, None, rule.hf_names, CopyRule())]
        return [WeightMapping(name, None, rule.hf_names, PaddedRows(published.vocab_size, model.vocab_size))]
    transform = rule.transform or _query_key_value(model, layer)
    mapping = WeightMapping(name, None, tuple(f"model.layers.{layer}.{part}" for part in rule.hf_names), transform)
    if "{e}" not in rule.hf_names[0]:
        return [mapping]
    return [
        replace(mapping, expert=expert, hf_names=tuple(part.replace("{e}", str(expert)) for part in mapping.hf_names))
        for expert in range(_num_experts(model, layer))
    ]


def _query_key_value(model: ModelConfig, layer: int) -> QueryKeyValue:
    mixer = _layer(model, layer).mixer
    assert isinstance(mixer, AttentionConfig), f"layer {layer} is not a q, k, v attention: {mixer}"
    return QueryKeyValue(mixer.num_query_groups, mixer.num_heads // mixer.num_query_groups)


def _num_experts(model: ModelConfig, layer: int) -> int:
    feed_forward = _layer(model, layer).feed_forward
    assert isinstance(feed_forward, MoEConfig), f"layer {layer} has no experts: {feed_forward}"
    return feed_forward.experts.num_experts


def _layer(model: ModelConfig, layer: int) -> LayerConfig:
    """Config of a layer; MTP layers, numbered after the last layer, have its config."""
    return model.layers[min(layer, len(model.layers) - 1)]
