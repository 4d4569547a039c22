"""Converts the config.json of a Hugging Face model to a ModelConfig."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_moe.checkpoint.huggingface.config_reader import HFConfig
from megatron_moe.checkpoint.huggingface.families import FAMILIES
from megatron_moe.config.attention import MLAConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig, MTPConfig

_MAX_LAYERS = 10_000
"""A larger number is a damaged file, whose layer configs could exhaust memory."""


def model_config_from_hf(values: Mapping[str, Any], *, mtp: bool = False) -> ModelConfig:
    """Builds the ModelConfig that a config.json describes; training options (balancing, dispatcher) keep defaults.

    Args:
        mtp: include the `num_nextn_predict_layers` MTP layers, whose weights many published folders omit.
    Raises:
        CheckpointProblem: unknown model type, unsupported options, or invalid values.
    """
    hf_config = HFConfig(values)
    try:
        return _model_config(hf_config, _read_layers(hf_config), mtp)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # e.g. a string for a list
        raise CheckpointProblem(f"config.json holds an invalid value: {error}; download the file again.") from error


def _read_layers(hf_config: HFConfig) -> tuple[LayerConfig, ...]:
    read = FAMILIES.get(hf_config.model_type)
    if read is None:
        known = ", ".join(FAMILIES)
        raise CheckpointProblem(f"config.json has the model type {hf_config.model_type}; supported are {known}.")
    num_layers = hf_config.get("num_hidden_layers", 0)
    hf_config.refuse_if(num_layers > _MAX_LAYERS, f"has num_hidden_layers = {num_layers}")
    return read(hf_config)


def _model_config(hf_config: HFConfig, layers: tuple[LayerConfig, ...], mtp: bool) -> ModelConfig:
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


def with_latent_norms_of(config: ModelConfig, published: ModelConfig) -> ModelConfig:
    """Copies the epsilon of the q and kv latent norms from `config` to `published` where it equals `rms_norm_eps`.

    A config.json has one epsilon. transformers uses 1e-6 for the latent norms regardless; Megatron-LM, vLLM and SGLang
    use rms_norm_eps, so the same file also describes models trained with them.
    """
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, norm=layer.norm))
        if isinstance(layer.mixer, MLAConfig) and own.mixer.norm == layer.norm
        else layer
        for own, layer in zip(config.layers, published.layers, strict=False)
    )
    return replace(published, layers=(*layers, *published.layers[len(layers) :]))
