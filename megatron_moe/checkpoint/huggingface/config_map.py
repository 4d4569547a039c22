"""From the config.json of a Hugging Face model to our ModelConfig."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_moe.checkpoint.huggingface import deepseek, grouped_query
from megatron_moe.checkpoint.huggingface.config_reader import HFConfig
from megatron_moe.config.attention import MLAConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import (
    InitConfig,
    LayerConfig,
    ModelConfig,
    MTPConfig,
)

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
"""By `model_type` of config.json. A new family is a function here, a table in checkpoint/huggingface/weight_map.py and
a logit test."""

_MOST_LAYERS = 10_000
"""More are a damaged file; their specs would fill the memory before anything else could notice."""


def model_config_from_hf(values: Mapping[str, Any], *, mtp: bool = False) -> ModelConfig:
    """The architecture that a config.json describes.

    Training choices (balancing losses, dispatcher) are left at "none" and "local". `mtp` takes the multi-token
    prediction layers of `num_nextn_predict_layers` along, whose weights many published folders leave out. Raises
    CheckpointProblem for an unknown model type, for options that would compute something else here, and for values
    that describe no model.
    """
    try:
        return _model_config(HFConfig(values), mtp)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # such as a text for a list
        raise CheckpointProblem(
            f"config.json holds a value that describes no model: {error}; download the file again."
        ) from error


def _model_config(hf_config: HFConfig, mtp: bool) -> ModelConfig:
    layers = _family(hf_config)
    num_mtp = int(hf_config.get("num_nextn_predict_layers", hf_config.get("num_mtp_layers", 0))) if mtp else 0
    std = float(hf_config.get("initializer_range", 0.02))
    return ModelConfig(
        hidden_size=hf_config.integer("hidden_size"),
        vocab_size=hf_config.integer("vocab_size"),
        layers=layers,
        norm=layers[0].norm,
        position_embedding="rope",
        max_positions=hf_config.get("max_position_embeddings", 4096),
        tied_embeddings=hf_config.get("tie_word_embeddings", False),
        mtp=MTPConfig(num_layers=num_mtp) if num_mtp else None,
        init=InitConfig(std=std, output_std=std / (2 * len(layers)) ** 0.5),
    )


def _family(hf_config: HFConfig) -> tuple[LayerConfig, ...]:
    read = dict(FAMILIES).get(hf_config.model_type)
    if read is None:
        known = ", ".join(name for name, _ in FAMILIES)
        raise CheckpointProblem(f"config.json has the model type {hf_config.model_type}; this program knows {known}.")
    num_layers = hf_config.get("num_hidden_layers", 0)
    hf_config.refuse_if(num_layers > _MOST_LAYERS, f"has num_hidden_layers = {num_layers}")
    return read(hf_config)


def with_latent_norms_of(ours: ModelConfig, published: ModelConfig) -> ModelConfig:
    """`published` with the epsilon of `ours` in the norms of compressed q and kv, where that is `rms_norm_eps`.

    A config.json has one epsilon. Hugging Face norms the latents with 1e-6 whatever it says; Megatron-LM, vLLM and
    SGLang norm them with it, so that weights trained that way are described by the same file.
    """
    layers = tuple(
        replace(theirs, mixer=replace(theirs.mixer, norm=theirs.norm))
        if isinstance(theirs.mixer, MLAConfig) and mine.mixer.norm == theirs.norm
        else theirs
        for mine, theirs in zip(ours.layers, published.layers, strict=False)
    )
    return replace(published, layers=(*layers, *published.layers[len(layers) :]))
