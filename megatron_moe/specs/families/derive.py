"""From the config.json of a Hugging Face model to our ModelSpec, and how far a spec is from it."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron_moe.specs.attention import MLASpec, RopeSpec, yarn_mscale
from megatron_moe.specs.exitcodes import CheckpointProblem
from megatron_moe.specs.families import deepseek, grouped_query
from megatron_moe.specs.families.reader import HFConfig
from megatron_moe.specs.model import InitSpec, LayerSpec, ModelSpec, MTPSpec
from megatron_moe.specs.moe import RouterSpec

FAMILIES = (
    ("mixtral", grouped_query.mixtral),
    ("qwen2_moe", grouped_query.qwen2_moe),
    ("qwen3_moe", grouped_query.qwen3_moe),
    ("olmoe", grouped_query.olmoe),
    ("gpt_oss", grouped_query.gpt_oss),
    ("glm4_moe", grouped_query.glm4_moe),
    ("deepseek_v2", deepseek.deepseek_v2),
    ("deepseek_v3", deepseek.deepseek_v3),
    ("kimi_k2", deepseek.deepseek_v3),
)
"""By `model_type` of config.json. A new family is a function here, a table in checkpoint/names.py and a logit test."""

_MOST_LAYERS = 10_000
"""More are a damaged file; their specs would fill the memory before anything else could notice."""

_TRAINING_CHOICES = frozenset(
    (
        *("dropout", "hidden_dropout", "embedding_dropout", "init", "max_positions", "mtp", "vocab_size"),
        *("balancing", "aux_loss_coeffs", "z_loss_coeff", "input_jitter_eps", "dtype", "bias_update_rate"),
        *("force_balancing", "force_biased", "quantile_ema", "capacity", "dispatcher", "shared_overlap", "grouped"),
    )
)
"""Fields that do not change what weights mean. The vocabulary may be padded, and is checked when weights are loaded."""


def model_spec_from_hf(values: Mapping[str, Any], *, mtp: bool = False) -> ModelSpec:
    """The architecture that a config.json describes.

    Training choices (balancing losses, dispatcher) are left at "none" and "local". `mtp` takes the multi-token
    prediction layers of `num_nextn_predict_layers` along, whose weights many published folders leave out. Raises
    CheckpointProblem for an unknown model type, for options that would compute something else here, and for values
    that describe no model.
    """
    try:
        return _model_spec(HFConfig(values), mtp)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # such as a text for a list
        raise CheckpointProblem(
            f"config.json holds a value that describes no model: {error}; download the file again."
        ) from error


def _model_spec(config: HFConfig, mtp: bool) -> ModelSpec:
    layers = _family(config)
    num_mtp = int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))) if mtp else 0
    std = float(config.get("initializer_range", 0.02))
    return ModelSpec(
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        layers=layers,
        norm=layers[0].norm,
        position_embedding="rope",
        max_positions=config.get("max_position_embeddings", 4096),
        tied_embeddings=config.get("tie_word_embeddings", False),
        mtp=MTPSpec(num_layers=num_mtp) if num_mtp else None,
        init=InitSpec(std=std, output_std=std / (2 * len(layers)) ** 0.5),
    )


def _family(config: HFConfig) -> tuple[LayerSpec, ...]:
    num_layers = config.get("num_hidden_layers", 0)
    config.refuse_if(num_layers > _MOST_LAYERS, f"has num_hidden_layers = {num_layers}")
    for name, read in FAMILIES:
        if name == config.model_type:
            return read(config)
    known = ", ".join(name for name, _ in FAMILIES)
    raise CheckpointProblem(f"config.json has the model type {config.model_type}; this program knows {known}.")


def differences(ours: ModelSpec, published: ModelSpec) -> list[str]:
    """One line per field in which `ours` would read the weights of `published` differently: layers and both values.

    What a silent mistake costs most: rope base, norm epsilon, softmax scale, top-k, score function.
    """
    if len(ours.layers) != len(published.layers):
        return [f"number of layers: {len(ours.layers)}, published {len(published.layers)}"]
    lines = _compare("", replace(ours, layers=()), replace(published, layers=()))
    of_layers: dict[str, list[int]] = {}
    for index, (mine, theirs) in enumerate(zip(ours.layers, published.layers, strict=True)):
        for line in _compare("", mine, theirs):
            of_layers.setdefault(line, []).append(index)
    return lines + [f"{_span(layers)} {line}" for line, layers in of_layers.items()]


def with_latent_norms_of(ours: ModelSpec, published: ModelSpec) -> ModelSpec:
    """`published` with the epsilon of `ours` in the norms of compressed q and kv, where that is `rms_norm_eps`.

    A config.json has one epsilon. Hugging Face norms the latents with 1e-6 whatever it says; Megatron-LM, vLLM and
    SGLang norm them with it, so that weights trained that way are described by the same file.
    """
    layers = tuple(
        replace(theirs, mixer=replace(theirs.mixer, norm=theirs.norm))
        if isinstance(theirs.mixer, MLASpec) and mine.mixer.norm == theirs.norm
        else theirs
        for mine, theirs in zip(ours.layers, published.layers, strict=False)
    )
    return replace(published, layers=(*layers, *published.layers[len(layers) :]))


def _span(layers: list[int]) -> str:
    """layer 3, layers 3-7, or layers 1, 3, 5."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    contiguous = layers[-1] - layers[0] == len(layers) - 1
    return f"layers {layers[0]}-{layers[-1]}" if contiguous else f"layers {', '.join(map(str, layers))}"


def _compare(where: str, mine: Any, theirs: Any) -> list[str]:
    if not is_dataclass(mine) or type(mine) is not type(theirs):
        close = isinstance(mine, float) and isinstance(theirs, float) and math.isclose(mine, theirs)
        return [] if close or mine == theirs else [f"{where.strip()}: {_short(mine)}, published {_short(theirs)}"]
    mine, theirs = _canonical(mine), _canonical(theirs)
    lines = []
    for field in fields(mine):
        if field.name not in _TRAINING_CHOICES:
            lines += _compare(f"{where}{field.name} ", getattr(mine, field.name), getattr(theirs, field.name))
    return lines


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


def _short(value: Any) -> str:
    return type(value).__name__ if is_dataclass(value) else repr(value)
