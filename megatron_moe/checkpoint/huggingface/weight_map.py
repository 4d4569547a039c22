"""Mapping between parameters and Hugging Face tensors, in both directions.

A rule contains the name of the parameter, the names of its Hugging Face tensors, and the transform between them.
Configs of components have the rules of their parameters; those outside transformer layers are here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.component import NameRule
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.registry import resolve
from megatron_moe.config.residual import ResidualConfig


@dataclass(frozen=True)
class Transform:
    """Bijection between one tensor of this program ("our") and the Hugging Face tensors that it consists of."""

    from_hf: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], Sequence[Tensor]]


COPY = Transform(lambda tensors: tensors[0], lambda tensor: [tensor])
ROW = Transform(lambda tensors: tensors[0].squeeze(0), lambda tensor: [tensor.unsqueeze(0)])
"""Transform of a vector: Hugging Face [1, E] <-> our [E]."""
GATE_UP = Transform(lambda tensors: torch.cat(list(tensors)), lambda tensor: tensor.chunk(2))
"""Hugging Face gate [F, ...] and up [F, ...] <-> our [2F, ...], gate rows first."""
COLUMNS = Transform(lambda tensors: torch.cat(list(tensors), dim=1), lambda tensor: tensor.chunk(2, dim=1))
"""Two Hugging Face matrices [O, I] <-> our [O, 2I], which multiplies their inputs one after the other."""
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


def query_key_value(num_groups: int, heads_per_group: int, num_parts: int = 1) -> Transform:
    """Hugging Face q, k and v matrices <-> our fused matrix. Its rows are, for each query group: q heads, gates of the
    heads if `num_parts` is 2, k, v. The Hugging Face q matrix has the gate of a head after the head."""

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        q, *others = (part.reshape(num_groups, -1, *part.shape[1:]) for part in tensors)
        q = q.unflatten(1, (heads_per_group, num_parts, -1)).transpose(1, 2).flatten(1, 3)
        return torch.cat([q, *others], dim=1).flatten(0, 1)

    def to_hf(tensor: Tensor) -> list[Tensor]:
        groups = tensor.reshape(num_groups, num_parts * heads_per_group + 2, -1, *tensor.shape[1:])
        q, k, v = groups.split([num_parts * heads_per_group, 1, 1], dim=1)
        q = q.unflatten(1, (num_parts, heads_per_group)).transpose(1, 2).flatten(1, 2)
        return [part.flatten(0, 2) for part in (q, k, v)]

    return Transform(from_hf, to_hf)


def padded_rows(num_rows: int, num_padded: int) -> Transform:
    """Table with a row per token id: Hugging Face [num_rows, ...] <-> our [num_padded, ...], whose last rows are 0.
    Ids are written as int64, as in published folders."""

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0], tensors[0].new_zeros(num_padded - num_rows, *tensors[0].shape[1:])])

    def to_hf(tensor: Tensor) -> list[Tensor]:
        rows = tensor[:num_rows]
        return [rows if rows.is_floating_point() else rows.long()]

    return Transform(from_hf, to_hf)


TRANSFORMS: Mapping[str, Transform | Callable[..., Transform]] = MappingProxyType(
    {
        "copy": COPY,
        "row": ROW,
        "gate_up": GATE_UP,
        "columns": COLUMNS,
        "transposed": TRANSPOSED,
        "interleaved_gate_up": INTERLEAVED_GATE_UP,
        "query_key_value": query_key_value,
    }
)
"""Transforms, and functions from sizes to transforms, by their name in `NameRule`."""
_VOCABULARY = "vocabulary"
"""Transform name in `NameRule` that stands for `padded_rows` with the vocabulary sizes of the Hugging Face folder and
of the model."""


@dataclass(frozen=True)
class WeightMapping:
    """Maps one parameter, or one expert's slice of it, to the Hugging Face tensors that it consists of."""

    name: str
    expert: int | None
    hf_names: tuple[str, ...]
    transform: Transform


class Names(NamedTuple):
    """Hugging Face names of a model family for parameters outside the components of its layers."""

    layers: str = "model.layers"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms before mixer and feed-forward module, relative to the layer."""
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    mtp_layers: str = ""
    """Name of the MTP layers; empty if they are numbered after the regular layers and have copies of embedding and
    output head."""
    mtp_final_norm: str = "shared_head.norm"
    """Name of the norm after an MTP layer, relative to the layer."""
    mtp_norms: tuple[str, str] = ("enorm", "hnorm")
    """Names of the norms of embedding and hidden state before an MTP layer, relative to the layer."""
    mtp_projections: tuple[str, ...] = ("eh_proj",)
    """Names of the parts of an MTP layer's projection [H, 2H] of embedding and hidden state, relative to the layer."""
    only_mtp: str = ""
    """Name prefix of an MTP layer's norms and projection in families with a single MTP layer; empty if these names are
    relative to the layer."""
    splits_mtp: bool = False
    """Whether the mixer and the feed-forward module of an MTP layer have the names of two layers, the first of which
    has the norms and the projection before it, and the last one the norm after it."""
    mtp_count: str = "num_nextn_predict_layers"
    """Key of config.json with the number of MTP layers."""

    def model_rules(self, residual: ResidualConfig, model_type: str) -> Iterator[NameRule]:
        """Name rules of the parameters outside layers: embedding, final norm, output layer and streams head."""
        yield NameRule("embedding.word_embeddings.weight", (f"{self.embedding}.weight",), _VOCABULARY)
        yield NameRule("decoder.final_layernorm.weight", (f"{self.final_norm}.weight",))
        yield NameRule("output_layer.weight", (f"{self.head}.weight",), _VOCABULARY)
        for rule in residual.head_name_rules(model_type):
            yield replace(rule, name=f"decoder.streams_head.{rule.name}")

    def mtp_rules(self, residual: ResidualConfig, model_type: str) -> Iterator[NameRule]:
        """Rules of the parameters of an MTP layer outside its transformer layer."""
        start = f"{self.only_mtp}." if self.only_mtp else ""
        norms = zip(("enorm", "hnorm", "final_layernorm"), (*self.mtp_norms, self.mtp_final_norm), strict=True)
        for norm, hf_norm in norms:
            yield NameRule(f"{norm}.weight", (f"{start}{hf_norm}.weight",))
        projections = tuple(f"{start}{name}.weight" for name in self.mtp_projections)
        yield NameRule("eh_proj.weight", projections, "columns" if len(projections) > 1 else "copy")
        for rule in residual.head_name_rules(model_type):
            yield replace(rule, name=f"streams_head.{rule.name}")

    def prefix(self, layer: int, num_layers: int) -> str:
        """Name prefix of a layer. MTP layers are numbered from `num_layers` on."""
        if layer < num_layers or not self.mtp_layers:
            return f"{self.layers}.{layer}"
        return f"{self.mtp_layers}.{layer - num_layers}"

    def is_mtp(self, name: str, num_layers: int) -> bool:
        """Whether `name` is the Hugging Face name of a tensor of an MTP layer."""
        if self.only_mtp:
            return name.startswith(f"{self.only_mtp}.")
        start = f"{self.mtp_layers or self.layers}."
        number = name.removeprefix(start).split(".", 1)[0]
        first = 0 if self.mtp_layers else num_layers
        return name.startswith(start) and number.isdecimal() and int(number) >= first


_QWEN_HYBRID = Names(
    mtp_layers="mtp.layers",
    mtp_final_norm="norm",
    mtp_norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    mtp_projections=("fc",),
    only_mtp="mtp",
    mtp_count="mtp_num_hidden_layers",
)
_NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "qwen3_next": _QWEN_HYBRID,
        "qwen3_5_moe_text": _QWEN_HYBRID,
        "nemotron_h": Names(
            "backbone.layers",
            ("norm", "norm"),
            "backbone.embeddings",
            "backbone.norm_f",
            mtp_layers="mtp.layers",
            mtp_final_norm="final_layernorm",
            splits_mtp=True,
        ),
        "deepseek_v4": Names(
            layers="layers",
            norms=("attn_norm", "ffn_norm"),
            embedding="embed",
            final_norm="norm",
            head="head",
            mtp_layers="mtp",
            mtp_final_norm="norm",
            mtp_projections=("e_proj", "h_proj"),
        ),
    }
)
"""Names of families that differ from the defaults, by `model_type`."""
_USUAL = Names()

MTP_EMBEDDING = "embed_tokens.weight"
MTP_HEAD = "shared_head.head.weight"
"""Name of an MTP layer's copy of the output head in Hugging Face folders, relative to the name of the layer."""

_LAYER_NAME = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_MTP_LAYER_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.transformer_layer\.(?P<rest>.+)")
_MTP_NAME = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_ONLY_MTP_NAME = re.compile(r"mtp\.layers\.0\.(?P<rest>.+)")
_MODEL_NAME = re.compile(r"(?P<rest>.+)")
_LAST_MODULE = ("mlp.", "pre_mlp_layernorm.", "final_layernorm.")
"""Name prefixes, within an MTP layer, of the parameters of its last module and of the norm after it."""


def names_of(model_type: str) -> Names:
    """Hugging Face names of a model family outside the components of its layers."""
    return _NAMES.get(model_type, _USUAL)


def map_names(
    model_type: str, names: Iterable[str], model: ModelConfig, published: ModelConfig
) -> tuple[list[WeightMapping], list[str]]:
    """Maps parameter and buffer names of `model` to Hugging Face. Returns the mappings and the names without a rule.

    `published` is the config of the Hugging Face folder, whose vocabulary is not padded.
    """
    num_layers, family = len(published.layers), names_of(model_type)
    by_layer = [_layer_rules(model_type, layer) for layer in (*model.layers, model.mtp_layer)]
    outside = (family.mtp_rules(model.residual, model_type), family.model_rules(model.residual, model_type))
    of_mtp, of_model = ({rule.name: rule for rule in rules} for rules in outside)
    mtp_name = _ONLY_MTP_NAME if family.only_mtp else _MTP_NAME
    tables = ((mtp_name, of_mtp), (_MODEL_NAME, of_model))
    split = len(model.mtp_layer.sublayers) if family.splits_mtp else 1
    mappings: list[WeightMapping] = []
    unknown: list[str] = []
    for name in names:
        found = _find_in_layer(name, by_layer, num_layers, split) or _find(name, tables, num_layers, split)
        if found is None:
            unknown.append(name)
        else:
            mappings += _expand(name, *found, family, model, published)
    return mappings, unknown


def _mtp_number(match: re.Match[str], num_layers: int, split: int) -> int:
    """Number in the Hugging Face folder of the layer that holds a parameter of an MTP layer, which consists of `split`
    layers there."""
    return num_layers + int(match["layer"]) * split + (split - 1) * match["rest"].startswith(_LAST_MODULE)


def _find(
    name: str, tables: Iterable[tuple[re.Pattern[str], dict[str, NameRule]]], num_layers: int, split: int
) -> tuple[NameRule, int | None] | None:
    """Returns the rule for a name and the Hugging Face layer number (None outside layers); None if no rule matches."""
    for pattern, rules in tables:
        match = pattern.fullmatch(name)
        if match and match["rest"] in rules:
            is_numbered = "layer" in match.groupdict()
            return rules[match["rest"]], _mtp_number(match, num_layers, split) if is_numbered else None
    return None


def _layer_rules(model_type: str, layer: LayerConfig) -> dict[str, NameRule]:
    """Rules of a layer's parameters, by their name in the layer."""
    rules: dict[str, NameRule] = {}
    for prefix, norm, component in layer.sublayers:
        hf_norm = names_of(model_type).norms[prefix == "mlp"]
        rules[f"{norm}.weight"] = NameRule(f"{norm}.weight", (f"{hf_norm}.weight",))
        rules |= {f"{prefix}.{rule.name}": rule for rule in component.name_rules(model_type)}
        connection = f"{prefix}_{layer.residual.submodule}"
        rules |= {f"{connection}.{rule.name}": rule for rule in layer.residual.name_rules(prefix, model_type)}
    return rules


def _find_in_layer(
    name: str, by_layer: Sequence[Mapping[str, NameRule]], num_layers: int, split: int
) -> tuple[NameRule, int | None] | None:
    """Finds the rule of a transformer layer's parameter; MTP layers have the last rules."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        layer = int(match["layer"])
        rule = by_layer[layer].get(match["rest"])
        return None if rule is None else (rule, layer)
    match = _MTP_LAYER_NAME.fullmatch(name)
    rule = by_layer[-1].get(match["rest"]) if match else None
    return None if match is None or rule is None else (rule, _mtp_number(match, num_layers, split))


def _expand(
    name: str, rule: NameRule, layer: int | None, family: Names, model: ModelConfig, published: ModelConfig
) -> list[WeightMapping]:
    transform: Transform | Callable[..., Transform]
    if rule.transform == _VOCABULARY:
        transform = padded_rows(published.vocab_size, model.vocab_size)
    else:
        transform = TRANSFORMS[rule.transform] if rule.transform in TRANSFORMS else resolve(rule.transform)
    if not isinstance(transform, Transform):
        transform = transform(*rule.arguments)
    start = "" if layer is None else f"{family.prefix(layer, len(published.layers))}."
    mapping = WeightMapping(name, None, tuple(f"{start}{part}" for part in rule.hf_names), transform)
    if "{e}" not in rule.hf_names[0]:
        return [mapping]
    return [
        replace(mapping, expert=expert, hf_names=tuple(part.replace("{e}", str(expert)) for part in mapping.hf_names))
        for expert in range(rule.num_experts)
    ]
