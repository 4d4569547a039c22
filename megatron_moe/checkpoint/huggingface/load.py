"""Weights from a local Hugging Face folder into a model. `hf_export.py` is the way back.

Everything is checked before the first number is copied: names, shapes, dtypes. Then one tensor at a time goes from the
file into its parameter.
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
    """Fills what this rank holds of every parameter and expert bias of `model`, whose spec is `spec`, from the folder.

    `stages` are the pipeline ranks that hold the whole model together; None: this one holds all layers.
    Returns notes worth showing: where `spec` differs from the folder's config in what the weights mean, and what was
    left out. Raises CheckpointProblem, before anything is changed, with the full list of tensors that are missing,
    left over, of another shape or not floating point.
    """
    hf_config = read_config(folder)
    published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
    targets = weight_tensors(model)
    with ExitStack() as stack:
        source = HFFolder(folder, hf_config, stack)
        counterparts, ignored = fitting(folder, source, hf_config["model_type"], targets, config, published, stages)
        for counterpart in counterparts:
            _fill(targets[counterpart.ours], counterpart, source)
    return notes(config, published, ignored)


def fitting(
    folder: Path,
    source: HFFolder,
    model_type: str,
    targets: Mapping[str, Tensor],
    config: ModelConfig,
    published: ModelConfig,
    stages: ProcessGroup | None = None,
) -> tuple[list[weight_map.Counterpart], list[str]]:
    """Where every target comes from, and the names of the folder that are passed over.

    Raises CheckpointProblem with the full list of what is missing, left over, misshapen or not floating point.
    """
    counterparts, unknown = weight_map.map_names(model_type, targets, config, published)
    # pp: names of tensors, and further down of problems, so that all ranks come to the same end
    wanted = set(_of_all((name for counterpart in counterparts for name in counterpart.theirs), stages))
    extra = sorted(source.names - wanted)
    ignored = [name for name in extra if _ignorable(name, config, published)]
    no_mtp = config.mtp is not None and not any(_of_mtp(name, published) for name in source.names)
    missing = [name for name in sorted(wanted - source.names) if not (no_mtp and _of_mtp(name, published))]
    problems = [
        *(["it has no layers of multi-token prediction: give --mtp-num-layers 0"] if no_mtp else []),
        *_vocabulary_problems(config, published),
        *(f"no counterpart: {name}" for name in unknown),
        *(f"missing: {name}" for name in missing),
        *(f"left over: {name}" for name in extra if name not in ignored),
        *_misshaped(counterparts, targets, source),
    ]
    problems = list(dict.fromkeys(_of_all(problems, stages)))
    if problems:
        raise CheckpointProblem(
            f"{folder} does not fit this model in {len(problems)} places; compare the model flags with its "
            f"config.json:\n  {listed(problems)}"
        )
    return counterparts, ignored


def _of_mtp(name: str, published: ModelConfig) -> bool:
    """The tensor belongs to a layer after the last one of the model, which is one of multi-token prediction."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= len(published.layers)


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the expert biases among the buffers. Other buffers are state of the training, not weights."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    targets.update((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
    return targets


def _of_all(values: Iterable[str], stages: ProcessGroup | None) -> list[str]:
    """The values of all stages."""
    if stages is None:
        return list(values)
    return [value for of_stage in gather_objects(list(values), stages) for value in of_stage]


def _fill(target: Tensor, counterpart: weight_map.Counterpart, source: HFFolder) -> None:
    """Writes what this rank holds of the counterpart's tensor, if anything."""
    held = held_experts(target) if counterpart.expert is not None and isinstance(target, Parameter) else None
    if held is not None and counterpart.expert not in held:
        return
    whole = counterpart.transform.to_ours([source.tensor(name) for name in counterpart.theirs])
    if not isinstance(target, Parameter):
        target.copy_(whole)
    elif held is not None and counterpart.expert is not None:
        target[counterpart.expert - held.start].copy_(expert_part(whole, target))
    else:
        target.copy_(local_part(whole, target.boxes, target.meta))


def whole_shape(target: Tensor, counterpart: weight_map.Counterpart) -> tuple[int, ...]:
    """Of the counterpart's tensor, of which this rank may hold a part."""
    shape = target.global_shape if isinstance(target, Parameter) else tuple(target.shape)
    return shape if counterpart.expert is None else shape[1:]


def _vocabulary_problems(config: ModelConfig, published: ModelConfig) -> list[str]:
    if published.vocab_size <= config.vocab_size:
        return []
    return [f"vocabulary: {published.vocab_size} words do not fit in the model's {config.vocab_size} rows"]


def _misshaped(
    counterparts: Sequence[weight_map.Counterpart], targets: Mapping[str, Tensor], source: HFFolder
) -> list[str]:
    """Tensors that are there but do not make up the parameter. Shapes go through the transforms on the meta device."""
    problems = []
    for counterpart in counterparts:
        if not source.names.issuperset(counterpart.theirs):
            continue
        odd = [f"{name} is {source.dtype(name)}" for name in counterpart.theirs if source.dtype(name) not in _FLOATS]
        problems += [f"not a plain floating-point tensor: {each}" for each in odd]
        shapes = [source.shape(name) for name in counterpart.theirs]
        try:
            made = tuple(counterpart.transform.to_ours([torch.empty(shape, device="meta") for shape in shapes]).shape)
        except RuntimeError:
            made = None
        expected = whole_shape(targets[counterpart.ours], counterpart)
        if made != expected:
            theirs = ", ".join(f"{name} {list(shape)}" for name, shape in zip(counterpart.theirs, shapes, strict=True))
            problems.append(f"another shape: {counterpart.ours} {list(expected)} from {theirs}")
    return problems


def _ignorable(name: str, config: ModelConfig, published: ModelConfig) -> bool:
    """Tensors without a parameter of ours that change nothing: derived, repeated, or for an objective not used."""
    if _ROTARY_BUFFER.fullmatch(name):
        return True
    if name == "lm_head.weight":
        return published.tied_embeddings
    return _of_mtp(name, published) and (config.mtp is None or name.split(".", 3)[3] in _SHARED_COPIES)


def notes(config: ModelConfig, published: ModelConfig, ignored: Sequence[str]) -> list[str]:
    """What is worth showing about weights that fit."""
    lines = [f"differs from the published model: {line}" for line in differences(config, published)]
    if ignored:
        lines.append(f"{len(ignored)} tensors not used: {', '.join(ignored[:3])}{' …' if len(ignored) > 3 else ''}")
    padding = config.vocab_size - published.vocab_size
    if padding:
        lines.append(f"{padding} padding rows of the vocabulary start at zero")
    return lines
