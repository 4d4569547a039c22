"""Loads the weights of a local Hugging Face folder into a model, one tensor at a time.

All names, shapes and dtypes are checked before the first parameter is modified.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_moe.checkpoint.huggingface import weight_map
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.text import listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.parameter import Parameter, local_expert_ids, local_shard, local_shard_of_expert

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_INTEGERS = frozenset(("I64", "I32"))
UNREAD = re.compile(
    r".*\.rotary_emb\.inv_freq|model\.visual\..*|model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\..*"
)
"""Names of tensors that no model of this program has: RoPE tables, image encoders, and the multi-token prediction of
ERNIE 4.5, which transformers does not load either."""
_SEPARATE_MTP = "mtp."
"""Name prefix of MTP layers that are not numbered after the regular layers."""
_SHARED_COPIES = frozenset((weight_map.MTP_EMBEDDING, weight_map.MTP_HEAD))


@torch.no_grad()
def load_hf(folder: Path, model: nn.Module, config: ModelConfig, stages: ProcessGroup | None = None) -> list[str]:
    """Fills this rank's shard of every parameter and expert bias of `model`, which `config` describes.

    Args:
        stages: pipeline group whose ranks together hold all layers; None means that this rank holds all layers.
    Returns:
        Notes for the log: differences between `config` and the folder's config.json, and unused tensors.
    Raises:
        CheckpointProblem: lists all tensors that are missing, unexpected, misshapen or not floating point. Raised
            before any parameter is modified.
    """
    with ExitStack() as stack:
        weights = match_weights(folder, model, config, stack, stages)
        for mapping in weights.mappings:
            _fill(weights.targets[mapping.name], mapping, weights.source)
    return weights.notes


@dataclass(frozen=True)
class MatchedWeights:
    """A Hugging Face folder whose tensors were mapped to the parameters and expert biases of a model."""

    source: HFFolder
    targets: Mapping[str, Tensor]
    """Parameters and expert biases of the model by name."""
    mappings: list[weight_map.WeightMapping]
    ignored: list[str]
    """Names of the Hugging Face tensors that the model does not use."""
    notes: list[str]
    """Notes for the log: differences between `config` and config.json, unused tensors, and vocabulary padding."""


def match_weights(
    folder: Path, model: nn.Module, config: ModelConfig, stack: ExitStack, stages: ProcessGroup | None = None
) -> MatchedWeights:
    """Opens a Hugging Face folder and maps all weights of `model` to its tensors. `stack` closes the files. `stages`:
    group of the pipeline ranks, which each hold a part of the model; None if `model` is complete.

    Raises CheckpointProblem that lists all tensors that are missing, unexpected, misshapen or not floating point.
    """
    hf_config = read_config(folder)
    published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
    source, targets = HFFolder(folder, hf_config, stack), weight_tensors(model)
    family, num_layers = hf_config["model_type"], len(published.layers)
    mappings, unknown = weight_map.map_names(family, targets, config, published)
    is_mtp = partial(weight_map.names_of(family).is_mtp, num_layers=num_layers)
    # collective over pp: names of tensors, and below of problems, so that all ranks raise together
    wanted = set(_gather((name for mapping in mappings for name in mapping.hf_names), stages))
    extra = sorted(source.names - wanted)
    ignored = [name for name in extra if _ignorable(name, config, published, is_mtp)]
    no_mtp = config.mtp is not None and not any(map(is_mtp, source.names))
    missing = [name for name in sorted(wanted - source.names) if not (no_mtp and is_mtp(name))]
    padding = config.vocab_size - published.vocab_size
    problems = [
        *(["it has no MTP layers: give --mtp-num-layers 0"] if no_mtp else []),
        *([f"vocabulary: {-padding} tokens more than the model's {config.vocab_size} rows"] if padding < 0 else []),
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
    notes = [f"differs from the published model: {line}" for line in config_differences(config, published)]
    if ignored:
        notes.append(f"{len(ignored)} tensors not used: {', '.join(ignored[:3])}{' …' if len(ignored) > 3 else ''}")
    if padding:
        notes.append(f"{padding} padding rows of the vocabulary start at zero")
    return MatchedWeights(source, targets, mappings, ignored, notes)


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, expert biases and expert tables of a model by name. Other buffers are training state and left out."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    kept = (".expert_bias", ".expert_table")
    targets.update((name, buffer) for name, buffer in model.named_buffers() if name.endswith(kept))
    return targets


def _gather(values: Iterable[str], stages: ProcessGroup | None) -> list[str]:
    if stages is None:
        return list(values)
    return [value for of_stage in gather_objects(list(values), stages) for value in of_stage]


def _fill(target: Tensor, mapping: weight_map.WeightMapping, source: HFFolder) -> None:
    """Copies this rank's shard of the mapped tensors to `target`; skips experts that this rank does not hold."""
    held = local_expert_ids(target) if mapping.expert is not None and isinstance(target, Parameter) else None
    if held is not None and mapping.expert not in held:
        return
    value = mapping.transform.from_hf([source.tensor(name) for name in mapping.hf_names])
    if not isinstance(target, Parameter):
        target.copy_(value)
    elif held is not None and mapping.expert is not None:
        target[mapping.expert - held.start].copy_(local_shard_of_expert(value, target))
    else:
        target.copy_(local_shard(value, target.boxes, target.meta))


def _misshaped(
    mappings: Sequence[weight_map.WeightMapping], targets: Mapping[str, Tensor], source: HFFolder
) -> list[str]:
    """Lists tensors whose dtype or shape does not fit. Missing tensors are skipped."""
    problems = []
    for mapping in mappings:
        if not source.names.issuperset(mapping.hf_names):
            continue
        target = targets[mapping.name]
        known, kind = (_FLOATS, "floating-point") if target.is_floating_point() else (_INTEGERS, "integer")
        odd = [f"{name} is {source.dtype(name)}" for name in mapping.hf_names if source.dtype(name) not in known]
        problems += [f"not a plain {kind} tensor: {each}" for each in odd]
        shapes = [source.shape(name) for name in mapping.hf_names]
        try:
            made = tuple(mapping.transform.from_hf([torch.empty(shape, device="meta") for shape in shapes]).shape)
        except RuntimeError:
            made = None
        whole = target.global_shape if isinstance(target, Parameter) else tuple(target.shape)
        expected = whole if mapping.expert is None else whole[1:]
        if made != expected:
            found = ", ".join(f"{name} {list(shape)}" for name, shape in zip(mapping.hf_names, shapes, strict=True))
            problems.append(f"another shape: {mapping.name} {list(expected)} from {found}")
    return problems


def _ignorable(name: str, config: ModelConfig, published: ModelConfig, is_mtp: Callable[[str], bool]) -> bool:
    """True for tensors that may be ignored: RoPE tables, copies of embedding or head, and unused MTP layers."""
    if UNREAD.fullmatch(name):
        return True
    if name == "lm_head.weight":
        return published.tied_embeddings
    if name.startswith(_SEPARATE_MTP):
        return config.mtp is None
    return is_mtp(name) and (config.mtp is None or name.split(".", 3)[3] in _SHARED_COPIES)
