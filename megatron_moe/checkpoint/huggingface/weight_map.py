"""Our parameter names and layouts <-> those of Hugging Face, as data.

A rule names one parameter of a layer (or of the model's ends), the tensors it consists of on the other side, and the
transform between the two. Which rules apply follows from the parameters that a model has: nothing here knows families
beyond their tables, and every rule works in both directions.
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
    """Between one tensor of ours and the tensors it consists of. `to_theirs` undoes `to_ours` exactly."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor: ...

    def to_theirs(self, ours: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class CopyRule:
    """The same tensor under another name."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours]


@dataclass(frozen=True)
class GateUp:
    """gate [F, ...] and up [F, ...] <-> [2F, ...], gate rows first."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(theirs))

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return list(ours.chunk(2))


@dataclass(frozen=True)
class QueryKeyValue:
    """q [N D, ...], k [G D, ...], v [G D, ...] <-> rows grouped by query group: its q heads, its k, its v."""

    num_groups: int
    heads_per_group: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        parts = [part.reshape(self.num_groups, -1, *part.shape[1:]) for part in theirs]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        groups = ours.reshape(self.num_groups, self.heads_per_group + 2, -1, *ours.shape[1:])
        q, k, v = groups.split([self.heads_per_group, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in (q, k, v)]


@dataclass(frozen=True)
class Transposed:
    """Stacks of matrices [E, I, O] <-> [E, O, I]."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0].transpose(1, 2)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours.transpose(1, 2)]


@dataclass(frozen=True)
class Alternating:
    """GPT-OSS: gate and up alternate along the last dim, and weights are transposed besides. Weights [E, H, 2F] <->
    [E, 2F, H], biases [E, 2F] <-> [E, 2F], with the gate half first on our side."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        halves = torch.cat([theirs[0][..., 0::2], theirs[0][..., 1::2]], dim=-1)
        return halves.transpose(1, 2) if halves.dim() == 3 else halves

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        halves = ours.transpose(1, 2) if ours.dim() == 3 else ours
        return [torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)]


@dataclass(frozen=True)
class PaddedRows:
    """The true vocabulary <-> our table with padding rows at its end, which are zero."""

    true_rows: int
    padded_rows: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        table = theirs[0]
        return torch.cat([table, table.new_zeros(self.padded_rows - self.true_rows, *table.shape[1:])])

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours[: self.true_rows]]


@dataclass(frozen=True)
class NameRule:
    """One parameter of a layer. `{e}` in `theirs` is the expert: then the transform works on one expert's slice of our
    stack. `transform` None stands for the interleaving of q, k and v, whose sizes come from the model."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform | None = CopyRule()


@dataclass(frozen=True)
class Counterpart:
    """One parameter, or one expert's slice of it, and the tensors it consists of on the other side."""

    ours: str
    expert: int | None
    theirs: tuple[str, ...]
    transform: Transform


def _same(
    suffixes: Iterable[str], ours: str, *theirs: str, transform: Transform | None = CopyRule()
) -> tuple[NameRule, ...]:
    """The same rule for weight and bias."""
    return tuple(NameRule(f"{ours}.{s}", tuple(f"{name}.{s}" for name in theirs), transform) for s in suffixes)


_BOTH = ("weight", "bias")

_NORMS = (
    NameRule("input_layernorm.weight", ("input_layernorm.weight",)),
    NameRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)

_GROUPED_QUERY = (
    *_same(_BOTH, "self_attention.linear_qkv", *(f"self_attn.{part}_proj" for part in "qkv"), transform=None),
    *_same(_BOTH, "self_attention.linear_proj", "self_attn.o_proj"),
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


def _mlp(ours: str, theirs: str) -> tuple[NameRule, ...]:
    gate, up, down = (f"{theirs}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        NameRule(f"{ours}.linear_fc1.weight", (gate, up), GateUp()),
        NameRule(f"{ours}.linear_fc2.weight", (down,)),
    )


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
    *_same(_BOTH, "mlp.router", "mlp.router"),
    NameRule("mlp.experts.linear_fc1.weight", ("mlp.experts.gate_up_proj",), Alternating()),
    NameRule("mlp.experts.linear_fc1.bias", ("mlp.experts.gate_up_proj_bias",), Alternating()),
    NameRule("mlp.experts.linear_fc2.weight", ("mlp.experts.down_proj",), Transposed()),
    NameRule("mlp.experts.linear_fc2.bias", ("mlp.experts.down_proj_bias",)),
)

_LAYERS = (
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
"""Rules of one layer by `model_type` of config.json."""

_ENDS = (
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
"""Of one depth of multi-token prediction beside its layer (DeepSeek-V3, GLM-4.5): their layer `num_layers + depth`."""

MTP_EMBEDDING = "embed_tokens.weight"
MTP_HEAD = "shared_head.head.weight"
"""Multi-token prediction layers repeat the embedding and the head, which are shared."""

_LAYER_NAME = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.transformer_layer\.(?P<rest>.+)")
_MTP_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_END_NAME = re.compile(r"(?P<rest>.+)")


def map_names(
    model_type: str, ours: Iterable[str], model: ModelConfig, published: ModelConfig
) -> tuple[list[Counterpart], list[str]]:
    """Where each of our parameters and buffers comes from, and the names that have no counterpart.

    `model` is the spec of the model that has the names; `published` the spec of the folder, whose vocabulary is not
    padded.
    """
    rules = _by_suffix(next(table for name, table in _LAYERS if name == model_type))
    num_layers = len(published.layers)
    tables = (
        (_LAYER_NAME, rules, 0),
        (_MTP_LAYER_NAME, rules, num_layers),
        (_MTP_NAME, _by_suffix(_MTP), num_layers),
        (_END_NAME, _by_suffix(_ENDS), 0),
    )
    counterparts: list[Counterpart] = []
    unknown: list[str] = []
    for name in ours:
        found = _find(name, tables)
        if found is None:
            unknown.append(name)
        else:
            counterparts += _expand(name, *found, model, published)
    return counterparts, unknown


def _by_suffix(rules: Iterable[NameRule]) -> dict[str, NameRule]:
    return {rule.ours: rule for rule in rules}


def _find(
    name: str, tables: Iterable[tuple[re.Pattern[str], dict[str, NameRule], int]]
) -> tuple[NameRule, int | None] | None:
    """The rule of a name, and the layer of the other side that it stands for."""
    for pattern, rules, offset in tables:
        match = pattern.fullmatch(name)
        if match and match["rest"] in rules:
            layer = match.groupdict().get("layer")
            return rules[match["rest"]], None if layer is None else int(layer) + offset
    return None


def _expand(
    name: str, rule: NameRule, layer: int | None, model: ModelConfig, published: ModelConfig
) -> list[Counterpart]:
    if layer is None:
        if name not in _VOCABULARY:
            return [Counterpart(name, None, rule.theirs, CopyRule())]
        return [Counterpart(name, None, rule.theirs, PaddedRows(published.vocab_size, model.vocab_size))]
    transform = rule.transform or _query_key_value(model, layer)
    whole = Counterpart(name, None, tuple(f"model.layers.{layer}.{part}" for part in rule.theirs), transform)
    if "{e}" not in rule.theirs[0]:
        return [whole]
    return [
        replace(whole, expert=expert, theirs=tuple(part.replace("{e}", str(expert)) for part in whole.theirs))
        for expert in range(_num_experts(model, layer))
    ]


def _query_key_value(model: ModelConfig, layer: int) -> QueryKeyValue:
    mixer = _layer(model, layer).mixer
    assert isinstance(mixer, AttentionConfig), f"layer {layer} has no q, k and v: {mixer}"
    return QueryKeyValue(mixer.num_query_groups, mixer.num_heads // mixer.num_query_groups)


def _num_experts(model: ModelConfig, layer: int) -> int:
    feed_forward = _layer(model, layer).feed_forward
    assert isinstance(feed_forward, MoEConfig), f"layer {layer} has no experts: {feed_forward}"
    return feed_forward.experts.num_experts


def _layer(model: ModelConfig, layer: int) -> LayerConfig:
    """Layers past the last are those of multi-token prediction, which are like it."""
    return model.layers[min(layer, len(model.layers) - 1)]
