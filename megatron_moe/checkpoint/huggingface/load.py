"""Loads the weights of a local Hugging Face folder into a model, one tensor at a time.

All names, shapes and dtypes are checked before the first parameter is modified.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_moe.checkpoint.huggingface import weight_map
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.config.exit_codes import CheckpointProblem, listed
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import differences
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.parameter import Parameter, expert_part, held_experts, local_part

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_ROTARY_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SHARED_COPIES = frozenset((weight_map.MTP_EMBEDDING, weight_map.MTP_HEAD))


@torch.no_grad()
def load_hf(folder: Path, model: nn.Module, config: ModelConfig, stages: ProcessGroup | None = None) -> list[str]:
    """Fills this rank's shard of every parameter and expert bias of `model`, which `config` describes.

    Args:
        stages: pipeline group whose ranks together hold all layers; None: this rank holds all.
    Returns:
        Notes for the log: differences between `config` and the folder's config.json, and unused tensors.
    Raises:
        CheckpointProblem: lists all tensors that are missing, unexpected, misshapen or not floating point. Raised
            before any parameter is modified.
    """
    hf_config = read_config(folder)
    published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
    targets = weight_tensors(model)
    with ExitStack() as stack:
        source = HFFolder(folder, hf_config, stack)
        mappings, ignored = match_weights(folder, source, hf_config["model_type"], targets, config, published, stages)
        for mapping in mappings:
            _fill(targets[mapping.name], mapping, source)
    return load_notes(config, published, ignored)


def match_weights(
    folder: Path,
    source: HFFolder,
    model_type: str,
    targets: Mapping[str, Tensor],
    config: ModelConfig,
    published: ModelConfig,
    stages: ProcessGroup | None = None,
) -> tuple[list[weight_map.WeightMapping], list[str]]:
    """Maps every target to tensors of the folder. Returns the mappings and the names of unused tensors.

    Raises CheckpointProblem that lists all tensors that are missing, unexpected, misshapen or not floating point.
    """
    mappings, unknown = weight_map.map_names(model_type, targets, config, published)
    # pp: names of tensors, and below of problems, so that all ranks raise together
    wanted = set(_gather((name for mapping in mappings for name in mapping.hf_names), stages))
    extra = sorted(source.names - wanted)
    ignored = [name for name in extra if _ignorable(name, config, published)]
    no_mtp = config.mtp is not None and not any(_is_mtp(name, published) for name in source.names)
    missing = [name for name in sorted(wanted - source.names) if not (no_mtp and _is_mtp(name, published))]
    problems = [
        *(["it has no MTP layers: give --mtp-num-layers 0"] if no_mtp else []),
        *_vocabulary_problems(config, published),
        *(f"no mapping: {name}" for name in unknown),
        *(f"missing: {name}" for name in missing),
        *(f"left over: {name}" for name in extra if name not in ignored),
        *_misshaped(mappings, targets, source),
    ]
    problems = list(dict.fromkeys(_gather(problems, stages)))
    if problems:
        raise CheckpointProblem(
            f"{folder} does not fit this model in {len(problems)} places; compare the model flags with its "
            f"config.json:\n  {listed(problems)}"
        )
    return mappings, ignored


def _is_mtp(name: str, published: ModelConfig) -> bool:
    """True for tensors of MTP layers, which are numbered after the last layer."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= len(published.layers)


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and expert biases of a model. Other buffers are training state."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    targets.update((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
    return targets


def _gather(values: Iterable[str], stages: ProcessGroup | None) -> list[str]:
    if stages is None:
        return list(values)
    return [value for of_stage in gather_objects(list(values), stages) for value in of_stage]


def _fill(target: Tensor, mapping: weight_map.WeightMapping, source: HFFolder) -> None:
    """Copies this rank's shard of the mapped tensor, if any."""
    held = held_experts(target) if mapping.expert is not None and isinstance(target, Parameter) else None
    if held is not None and mapping.expert not in held:
        return
    value = mapping.transform.from_hf([source.tensor(name) for name in mapping.hf_names])
    if not isinstance(target, Parameter):
        target.copy_(value)
    elif held is not None and mapping.expert is not None:
        target[mapping.expert - held.start].copy_(expert_part(value, target))
    else:
        target.copy_(local_part(value, target.boxes, target.meta))


def _global_shape(target: Tensor, mapping: weight_map.WeightMapping) -> tuple[int, ...]:
    shape = target.global_shape if isinstance(target, Parameter) else tuple(target.shape)
    return shape if mapping.expert is None else shape[1:]


def _vocabulary_problems(config: ModelConfig, published: ModelConfig) -> list[str]:
    if published.vocab_size <= config.vocab_size:
        return []
    return [f"vocabulary: {published.vocab_size} tokens exceed the model's {config.vocab_size} rows"]


def _misshaped(
    mappings: Sequence[weight_map.WeightMapping], targets: Mapping[str, Tensor], source: HFFolder
) -> list[str]:
    """Checks dtypes and, by running the transforms on the meta device, shapes of the tensors that exist."""
    problems = []
    for mapping in mappings:
        if not source.names.issuperset(mapping.hf_names):
            continue
        odd = [f"{name} is {source.dtype(name)}" for name in mapping.hf_names if source.dtype(name) not in _FLOATS]
        problems += [f"not a plain floating-point tensor: {each}" for each in odd]
        shapes = [source.shape(name) for name in mapping.hf_names]
        try:
            made = tuple(mapping.transform.from_hf([torch.empty(shape, device="meta") for shape in shapes]).shape)
        except RuntimeError:
            made = None
        expected = _global_shape(targets[mapping.name], mapping)
        if made != expected:
            found = ", ".join(f"{name} {list(shape)}" for name, shape in zip(mapping.hf_names, shapes, strict=True))
            problems.append(f"another shape: {mapping.name} {list(expected)} from {found}")
    return problems


def _ignorable(name: str, config: ModelConfig, published: ModelConfig) -> bool:
    """True for tensors that the model does not need: RoPE tables, copies of shared weights, and unused MTP layers."""
    if _ROTARY_BUFFER.fullmatch(name):
        return True
    if name == "lm_head.weight":
        return published.tied_embeddings
    return _is_mtp(name, published) and (config.mtp is None or name.split(".", 3)[3] in _SHARED_COPIES)


def load_notes(config: ModelConfig, published: ModelConfig, ignored: Sequence[str]) -> list[str]:
    """Log notes about loaded weights."""
    lines = [f"differs from the published model: {line}" for line in differences(config, published)]
    if ignored:
        lines.append(f"{len(ignored)} tensors not used: {', '.join(ignored[:3])}{' …' if len(ignored) > 3 else ''}")
    padding = config.vocab_size - published.vocab_size
    if padding:
        lines.append(f"{padding} padding rows of the vocabulary start at zero")
    return lines
