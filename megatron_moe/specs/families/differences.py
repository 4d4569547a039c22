"""Differences between two models in what their weights mean, and the form in which a checkpoint records a model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from megatron_moe.specs.attention import RopeSpec, yarn_mscale
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.moe import RouterSpec

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
"""Entries of `RouterSpec.balancing` that choose the experts themselves."""


class Difference(NamedTuple):
    """One field that differs, and where."""

    line: str
    """Place and both values."""
    training: bool
    """Changes how the model is trained, and not what its weights mean."""


def recorded(spec: Any) -> Any:
    """A spec as JSON values: a dataclass is a table with its name as "type". Equal models have equal tables."""
    if is_dataclass(spec) and not isinstance(spec, type):
        table = {field.name: recorded(getattr(_canonical(spec), field.name)) for field in fields(spec)}
        if isinstance(spec, RouterSpec):
            table["selection"] = next((name for name in spec.balancing if name in _SELECTIONS), "topk")
        return {"type": type(spec).__name__} | {k: v for k, v in table.items() if k not in _WITHOUT_EFFECT}
    return [recorded(each) for each in spec] if isinstance(spec, tuple | list) else spec


def recorded_model(model: ModelSpec) -> dict[str, Any]:
    """A model for a checkpoint: "kinds" are its different layers, "layers" the kind of each."""
    kinds = {layer: index for index, layer in enumerate(dict.fromkeys(model.layers))}
    rest = recorded(replace(model, layers=()))
    return {**rest, "layers": [kinds[layer] for layer in model.layers], "kinds": [recorded(kind) for kind in kinds]}


def model_differences(ours: ModelSpec, theirs: Mapping[str, Any], whose: str) -> list[Difference]:
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


def differences(ours: ModelSpec, published: ModelSpec) -> list[str]:
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


def _canonical(spec: Any) -> Any:
    """One way to say what can be said in several: a single group, a factor of 1, options that are not used."""
    if isinstance(spec, RouterSpec):
        grouped = (spec.num_groups or 1) > 1
        return replace(
            spec,
            num_groups=spec.num_groups if grouped else None,
            group_topk=spec.group_topk if grouped else None,
            pre_softmax=spec.pre_softmax and spec.score_function == "softmax",
            scaling_factor=None if spec.scaling_factor == 1.0 else spec.scaling_factor,
        )
    if isinstance(spec, RopeSpec) and (spec.scaling == "none" or spec.scaling_factor == 1.0):
        return RopeSpec(dim=spec.dim, base=spec.base, interleaved=spec.interleaved)
    if isinstance(spec, RopeSpec) and spec.scaling == "yarn":
        ratio = yarn_mscale(spec.scaling_factor, spec.mscale) / yarn_mscale(spec.scaling_factor, spec.mscale_all_dim)
        concentration = ratio if spec.concentration is None else spec.concentration
        return replace(spec, concentration=concentration, mscale=1.0, mscale_all_dim=0.0)
    return spec


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
