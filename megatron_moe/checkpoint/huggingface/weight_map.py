"""Mapping between parameters and Hugging Face tensors, in both directions.

A rule contains the name of the parameter, the names of its Hugging Face tensors, and the transform between them.
Configs of components have the rules of their parameters; those outside transformer layers are here.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.component import NameRule
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.registry import resolve


@dataclass(frozen=True)
class Transform:
    """Bijection between one tensor of this program ("our") and the Hugging Face tensors that it consists of."""

    from_hf: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], Sequence[Tensor]]


COPY = Transform(lambda tensors: tensors[0], lambda tensor: [tensor])
ROW = Transform(lambda tensors: tensors[0].squeeze(0), lambda tensor: [tensor.unsqueeze(0)])
"""Hugging Face [1, E] <-> our [E]."""
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
    """Vocabulary table: Hugging Face [num_rows, ...] <-> our [num_padded, ...] with zero rows at the end."""

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0], tensors[0].new_zeros(num_padded - num_rows, *tensors[0].shape[1:])])

    return Transform(from_hf, lambda tensor: [tensor[:num_rows]])


TRANSFORMS: Mapping[str, Transform | Callable[..., Transform]] = MappingProxyType(
    {
        "copy": COPY,
        "row": ROW,
        "gate_up": GATE_UP,
        "transposed": TRANSPOSED,
        "interleaved_gate_up": INTERLEAVED_GATE_UP,
        "query_key_value": query_key_value,
    }
)
"""Transforms, and functions from sizes to transforms, by their name in `NameRule`."""


@dataclass(frozen=True)
class WeightMapping:
    """Maps one parameter, or one expert's slice of it, to the Hugging Face tensors that it consists of."""

    name: str
    expert: int | None
    hf_names: tuple[str, ...]
    transform: Transform


class _Names(NamedTuple):
    """Hugging Face names of a model family for parameters outside the components of its layers."""

    layers: str = "model.layers"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms before mixer and feed-forward module, relative to the layer."""
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"

    def model_rules(self) -> tuple[NameRule, ...]:
        """Rules of the parameters outside layers."""
        return (
            NameRule("embedding.word_embeddings.weight", (f"{self.embedding}.weight",)),
            NameRule("decoder.final_layernorm.weight", (f"{self.final_norm}.weight",)),
            NameRule("output_layer.weight", ("lm_head.weight",)),
        )


_NAMES: Mapping[str, _Names] = MappingProxyType(
    {"nemotron_h": _Names("backbone.layers", ("norm", "norm"), "backbone.embeddings", "backbone.norm_f")}
)
"""Names of families that differ from the defaults, by `model_type`."""
_USUAL = _Names()
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
    num_layers = len(published.layers)
    by_layer = [_layer_rules(model_type, layer) for layer in (*model.layers, model.mtp_layer)]
    family = _NAMES.get(model_type, _USUAL)
    tables = ((_MTP_NAME, _by_name(_MTP), num_layers), (_MODEL_NAME, _by_name(family.model_rules()), 0))
    mappings: list[WeightMapping] = []
    unknown: list[str] = []
    for name in names:
        found = _find_in_layer(name, by_layer, num_layers) or _find(name, tables)
        if found is None:
            unknown.append(name)
        else:
            mappings += _expand(name, *found, family, model, published)
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


def _layer_rules(model_type: str, layer: LayerConfig) -> dict[str, NameRule]:
    """Rules of a layer's parameters, by their name in the layer."""
    rules: dict[str, NameRule] = {}
    for prefix, norm, component in layer.sublayers:
        hf_norm = _NAMES.get(model_type, _USUAL).norms[prefix == "mlp"]
        rules[f"{norm}.weight"] = NameRule(f"{norm}.weight", (f"{hf_norm}.weight",))
        rules |= {f"{prefix}.{rule.name}": rule for rule in component.name_rules(model_type)}
    return rules


def _find_in_layer(
    name: str, by_layer: Sequence[Mapping[str, NameRule]], num_layers: int
) -> tuple[NameRule, int | None] | None:
    """Finds the rule of a transformer layer's parameter; MTP layers have the last rules."""
    for pattern, offset in ((_LAYER_NAME, 0), (_MTP_LAYER_NAME, num_layers)):
        match = pattern.fullmatch(name)
        if match:
            layer = int(match["layer"])
            rule = by_layer[-1 if offset else layer].get(match["rest"])
            return None if rule is None else (rule, layer + offset)
    return None


def _expand(
    name: str, rule: NameRule, layer: int | None, family: _Names, model: ModelConfig, published: ModelConfig
) -> list[WeightMapping]:
    if layer is None:
        vocabulary = padded_rows(published.vocab_size, model.vocab_size)
        return [WeightMapping(name, None, rule.hf_names, vocabulary if name in _VOCABULARY else COPY)]
    transform = TRANSFORMS[rule.transform] if rule.transform in TRANSFORMS else resolve(rule.transform)
    if not isinstance(transform, Transform):
        transform = transform(*rule.arguments)
    mapping = WeightMapping(name, None, tuple(f"{family.layers}.{layer}.{part}" for part in rule.hf_names), transform)
    if "{e}" not in rule.hf_names[0]:
        return [mapping]
    return [
        replace(mapping, expert=expert, hf_names=tuple(part.replace("{e}", str(expert)) for part in mapping.hf_names))
        for expert in range(rule.num_experts)
    ]
