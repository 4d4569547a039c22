"""Differences between two models in what their weights mean, and the form in which a checkpoint records a model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from megatron_moe.config.attention import RopeConfig, yarn_mscale
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.moe import RouterConfig

_WITHOUT_EFFECT = frozenset(
    (
        *("dispatcher", "shared_overlap", "grouped", "probs_on_output", "loss_chunk", "context_exchange"),
        *("init", "max_positions", "vocab_size"),
    )
)
"""Fields that change no number of a trained model. The vocabulary may be padded; shapes are compared elsewhere."""
_TRAINING = frozenset(
    (
        *("dropout", "hidden_dropout", "embedding_dropout", "mtp", "capacity", "dtype"),
        *("balancing", "aux_loss_coeffs", "z_loss_coeff", "input_jitter_eps", "bias_update_rate", "quantile_ema"),
        *("force_balancing", "force_biased"),
    )
)
"""Fields that change how a model is trained, and not what its weights mean."""
_SELECTIONS = frozenset(("sinkhorn", "quantile_balancing", "expert_choice"))
"""Entries of `RouterConfig.balancing` that choose the experts themselves."""


class Difference(NamedTuple):
    """One field that differs, and where."""

    line: str
    """Place and both values."""
    training: bool
    """Changes how the model is trained, and not what its weights mean."""


def recorded(config: Any) -> Any:
    """A spec as JSON values: a dataclass is a table with its name as "type". Equal models have equal tables."""
    if is_dataclass(config) and not isinstance(config, type):
        table = {field.name: recorded(getattr(_canonical(config), field.name)) for field in fields(config)}
        if isinstance(config, RouterConfig):
            table["selection"] = next((name for name in config.balancing if name in _SELECTIONS), "topk")
        return {"type": type(config).__name__} | {k: v for k, v in table.items() if k not in _WITHOUT_EFFECT}
    return [recorded(each) for each in config] if isinstance(config, tuple | list) else config


def recorded_model(model: ModelConfig) -> dict[str, Any]:
    """A model for a checkpoint: "kinds" are its different layers, "layers" the kind of each."""
    kinds = {layer: index for index, layer in enumerate(dict.fromkeys(model.layers))}
    rest = recorded(replace(model, layers=()))
    return {**rest, "layers": [kinds[layer] for layer in model.layers], "kinds": [recorded(kind) for kind in kinds]}


def model_differences(ours: ModelConfig, theirs: Mapping[str, Any], whose: str) -> list[Difference]:
    """Fields in which a model differs from one of `recorded_model`, equal layers in one line. Fields that only one of
    them has are passed over: `theirs` may be of an older program.

    Args:
        whose: names `theirs` in the lines.
    """
    mine = recorded_model(ours)
    if len(mine["layers"]) != len(theirs["layers"]):
        return [Difference(f"number of layers: {len(mine['layers'])}, {whose} {len(theirs['layers'])}", training=False)]
    apart = ("layers", "kinds")
    my_top, their_top = ({key: each[key] for key in each if key not in apart} for each in (mine, theirs))
    found = list(_compare((), my_top, their_top, whose))
    of_kinds: dict[tuple[int, int], list[int]] = {}
    for index, kinds in enumerate(zip(mine["layers"], theirs["layers"], strict=True)):
        of_kinds.setdefault(kinds, []).append(index)
    of_layers: dict[Difference, list[int]] = {}
    for (my_kind, their_kind), layers in of_kinds.items():
        for difference in _compare((), mine["kinds"][my_kind], theirs["kinds"][their_kind], whose):
            of_layers.setdefault(difference, []).extend(layers)
    return found + [Difference(f"{_span(sorted(at))} {line}", training) for (line, training), at in of_layers.items()]


def differences(ours: ModelConfig, published: ModelConfig) -> list[str]:
    """One line per field in which `ours` would read the weights of `published` differently: layers and both values.

    What a silent mistake costs most: rope base, norm epsilon, softmax scale, top-k, score function.
    """
    found = model_differences(ours, recorded_model(published), "published")
    return [difference.line for difference in found if not difference.training]


def _compare(where: tuple[str, ...], mine: Any, theirs: Any, whose: str) -> Iterator[Difference]:
    tables = isinstance(mine, Mapping) and isinstance(theirs, Mapping)
    if tables and mine["type"] == theirs["type"]:
        for name, value in mine.items():
            if name in theirs:
                yield from _compare((*where, name), value, theirs[name], whose)
        return
    close = isinstance(mine, float) and isinstance(theirs, float) and math.isclose(mine, theirs)
    if not close and mine != theirs:
        line = f"{' '.join(where)}: {_short(mine)}, {whose} {_short(theirs)}"
        yield Difference(line, training=not _TRAINING.isdisjoint(where))


def _canonical(config: Any) -> Any:
    """One way to say what can be said in several: a single group, a factor of 1, options that are not used."""
    if isinstance(config, RouterConfig):
        grouped = (config.num_groups or 1) > 1
        return replace(
            config,
            num_groups=config.num_groups if grouped else None,
            group_topk=config.group_topk if grouped else None,
            pre_softmax=config.pre_softmax and config.score_function == "softmax",
            scaling_factor=None if config.scaling_factor == 1.0 else config.scaling_factor,
        )
    if isinstance(config, RopeConfig) and (config.scaling == "none" or config.scaling_factor == 1.0):
        return RopeConfig(dim=config.dim, base=config.base, interleaved=config.interleaved)
    if isinstance(config, RopeConfig) and config.scaling == "yarn":
        ratio = yarn_mscale(config.scaling_factor, config.mscale) / yarn_mscale(
            config.scaling_factor, config.mscale_all_dim
        )
        concentration = ratio if config.concentration is None else config.concentration
        return replace(config, concentration=concentration, mscale=1.0, mscale_all_dim=0.0)
    return config


def _span(layers: list[int]) -> str:
    """layer 3, layers 3-7, or layers 1, 3, 5."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    contiguous = layers[-1] - layers[0] == len(layers) - 1
    return f"layers {layers[0]}-{layers[-1]}" if contiguous else f"layers {', '.join(map(str, layers))}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value["type"])
    return repr(tuple(value) if isinstance(value, list) else value)
