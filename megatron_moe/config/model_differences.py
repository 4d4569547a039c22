"""Compares model configs, to determine whether weights of one model can be used in another, and converts them to the
form that checkpoints store."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from megatron_moe.config.attention import RopeConfig, yarn_mscale
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import RouterConfig

_WITHOUT_EFFECT = frozenset(
    (
        *("dispatcher", "shared_overlap", "grouped", "probs_on_output", "loss_chunk", "context_exchange", "cp_mode"),
        *("expert_rank_capacity_factor", "transport_backend", "push", "echo"),
        *("hybridep", "row_alignment", "rotate_activation"),
        *("init", "init_gating_factor", "max_positions", "vocab_size", "hash_vocab_size"),
        "position_embedding",  # recorded as learned_positions; mixers record rotary embeddings
    )
)
"""Config fields that are not compared, because they do not affect a trained model's output or, like the vocabulary
sizes, may include padding."""
_TRAINING = frozenset(
    (
        *("dropout", "hidden_dropout", "embedding_dropout", "mtp", "capacity", "dtype"),
        *("balancing", "aux_loss_coeffs", "z_loss_coeff", "input_jitter_eps", "bias_update_rate", "quantile_ema"),
        *("force_balancing", "force_biased", "force_skew", "indexer_loss_coeff", "sparse_indexer_loss"),
    )
)
"""Config fields that affect training but not the output of a trained model."""
_SELECTIONS = frozenset(("sinkhorn", "quantile_balancing", "expert_choice"))
"""Load-balancing methods (values in `RouterConfig.balancing`) that replace the top-k selection of experts."""


class ModelDifference(NamedTuple):
    """A config field whose values differ between two models."""

    line: str
    """Message that names the layers, the config field and its two values."""
    training: bool
    """True if the field affects training but not the output of a trained model."""


def config_as_json(config: Any) -> Any:
    """Converts a config to JSON values, without the fields in `_WITHOUT_EFFECT`. A dataclass becomes a dict with its
    class name as "type". Checkpoints store the result, so renaming a field changes their format."""
    if is_dataclass(config) and not isinstance(config, type):
        table = {field.name: config_as_json(getattr(_canonical(config), field.name)) for field in fields(config)}
        if isinstance(config, RouterConfig):
            own = "topk" if config.hash_vocab_size is None else "token_id"
            table["selection"] = next((name for name in config.balancing if name in _SELECTIONS), own)
        if isinstance(config, ModelConfig):
            table["learned_positions"] = config.position_embedding == "learned_absolute"
        return {"type": type(config).__name__} | {k: v for k, v in table.items() if k not in _WITHOUT_EFFECT}
    return [config_as_json(each) for each in config] if isinstance(config, tuple | list) else config


def recorded_model(model: ModelConfig) -> dict[str, Any]:
    """Converts a model config to JSON values: "kinds" lists the distinct layer configs, and "layers" has one index into
    "kinds" per layer. Settings with the same effect, such as one expert group and no groups, give equal results."""
    kinds = {layer: index for index, layer in enumerate(dict.fromkeys(model.layers))}
    rest = config_as_json(replace(model, layers=()))
    return {
        **rest,
        "layers": [kinds[layer] for layer in model.layers],
        "kinds": [config_as_json(kind) for kind in kinds],
    }


def model_differences(model: ModelConfig, other: Mapping[str, Any], name: str) -> list[ModelDifference]:
    """Config fields whose values differ between `model` and `other`, a result of `recorded_model`. If several layers
    differ in the same way, the list has one entry for them. Fields that only one model has are skipped, because an
    older version of this program may have written `other`. `name`: name of the other model in the messages."""
    record = recorded_model(model)
    if len(record["layers"]) != len(other["layers"]):
        line = f"number of layers: {len(record['layers'])}, {name} {len(other['layers'])}"
        return [ModelDifference(line, training=False)]
    top, other_top = ({k: v for k, v in each.items() if k not in ("layers", "kinds")} for each in (record, other))
    layers_of: dict[tuple[int, int], list[int]] = {}
    for index, kinds in enumerate(zip(record["layers"], other["layers"], strict=True)):
        layers_of.setdefault(kinds, []).append(index)
    by_line: dict[ModelDifference, list[int]] = {}
    for (kind, other_kind), layers in layers_of.items():
        for difference in compare_recorded((), record["kinds"][kind], other["kinds"][other_kind], name):
            by_line.setdefault(difference, []).extend(layers)
    merged = [ModelDifference(f"{_span(sorted(at))} {line}", training) for (line, training), at in by_line.items()]
    return [*compare_recorded((), top, other_top, name), *merged]


def config_differences(model: ModelConfig, published: ModelConfig) -> list[str]:
    """Messages about differing config fields that affect a model's output, such as RoPE base, norm epsilon or top-k.
    A message names the layers, the field and the values in both models."""
    found = model_differences(model, recorded_model(published), "published")
    return [difference.line for difference in found if not difference.training]


def layer_differences(layer: LayerConfig, published: LayerConfig) -> list[str]:
    """Messages about differing config fields that affect the output of a single layer."""
    found = compare_recorded((), config_as_json(layer), config_as_json(published), "published")
    return [difference.line for difference in found if not difference.training]


def compare_recorded(path: tuple[str, ...], value: Any, other: Any, name: str) -> Iterator[ModelDifference]:
    """Yields the differences of two results of `config_as_json` at `path`. `name`: name of the other model in the
    messages."""
    if isinstance(value, Mapping) and isinstance(other, Mapping) and _kind(value) == _kind(other):
        for key in value:
            if key in other and key != "type":
                yield from compare_recorded((*path, key), value[key], other[key], name)
        return
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other) and _has_tables(value):
        for index, pair in enumerate(zip(value, other, strict=True)):
            yield from compare_recorded((*path, str(index)), *pair, name)
        return
    close = isinstance(value, float) and isinstance(other, float) and math.isclose(value, other)
    if not close and value != other:
        line = f"{' '.join(path)}: {_short(value)}, {name} {_short(other)}"
        yield ModelDifference(line, training=not _TRAINING.isdisjoint(path))


def _has_tables(values: list[Any]) -> bool:
    return any(isinstance(value, Mapping) for value in values)


def _kind(table: Mapping[str, Any]) -> str:
    """Class name of a recorded config without the suffix "Config", which is "Spec" in older checkpoints."""
    return str(table["type"]).removesuffix("Config").removesuffix("Spec")


def _canonical(config: Any) -> Any:
    """Resets options without effect (a single expert group, a factor of 1), to make equivalent configs equal."""
    if isinstance(config, RouterConfig):
        grouped = (config.num_groups or 1) > 1
        return replace(
            config,
            num_groups=config.num_groups if grouped else None,
            group_topk=config.group_topk if grouped else None,
            pre_softmax=config.pre_softmax and config.scores.over_experts,
            scaling_factor=None if config.scaling_factor == 1.0 else config.scaling_factor,
        )
    if isinstance(config, RopeConfig) and (config.scaling == "none" or config.scaling_factor == 1.0):
        return RopeConfig(dim=config.dim, base=config.base, interleaved=config.interleaved)
    if isinstance(config, RopeConfig) and config.scaling == "yarn":
        factor = config.scaling_factor
        ratio = yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)
        concentration = ratio if config.concentration is None else config.concentration
        return replace(config, concentration=concentration, mscale=1.0, mscale_all_dim=0.0)
    return config


def _span(layers: list[int]) -> str:
    """Formats layer indices: `layer 3`, `layers 3-7` or `layers 1, 3, 5`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    contiguous = layers[-1] - layers[0] == len(layers) - 1
    return f"layers {layers[0]}-{layers[-1]}" if contiguous else f"layers {', '.join(map(str, layers))}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("recipe", value["type"]))
    if isinstance(value, list) and _has_tables(value):
        return f"{len(value)} entries"
    return repr(tuple(value) if isinstance(value, list) else value)
