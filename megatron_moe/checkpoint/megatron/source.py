"""A Megatron checkpoint as a table of tensors under our names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.names import (
    KINDS,
    PASSED_OVER,
    QUERY_NORM,
    STATE,
    Place,
    places,
)
from megatron_moe.checkpoint.megatron.per_rank import FILE, PerRank
from megatron_moe.checkpoint.megatron.torch_dist import TorchDist
from megatron_moe.checkpoint.tensor_shards import (
    PendingBox,
    SavedTensor,
    TensorBox,
    tensor_key,
)
from megatron_moe.config.exit_codes import CheckpointProblem, listed

Source = TorchDist | PerRank
_OTHER_FORM = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError, OSError)
"""Exceptions from reading tables that are not nested, typed or named as expected."""
_MAX_COUNT = 1 << 48
_VOCABULARY = frozenset(("embedding.word_embeddings.weight", "output_layer.weight"))


@dataclass
class Imported:
    """What a checkpoint holds of a model, to be read when it is written."""

    tensors: dict[str, SavedTensor]
    notes: list[str]
    iteration: int
    consumed_samples: int


def imported(source: Source, model: Mapping[str, Tensor], *, optimizer: bool) -> Imported:
    """Weights, buffers and, if asked for, the optimizer's state of a model whose tensors `model` gives by name.

    Raises CheckpointProblem with the full list of what is missing, left over or of another shape.
    """
    folder = source.folder
    _check_known(source)
    if optimizer and isinstance(source, PerRank):
        raise CheckpointProblem(
            f"{folder} has a folder per rank, whose optimizer state cannot be read; take its weights with "
            "--no-optimizer, or convert it with Megatron's own --ckpt-convert-format torch_dist"
        )
    used: set[str] = set()
    problems: list[str] = []
    tensors: dict[str, SavedTensor] = {}
    notes: list[str] = []
    for ours, like in model.items():
        place = next((place for place in places(ours) if place.name in source.tensors), None)
        if place is None:
            problems.append(f"missing: {ours}")
            continue
        used.add(place.name)
        tensors[tensor_key("model", ours)] = _later(source, place, ours, like, like.dtype, problems, notes)
    if optimizer:
        tensors |= _optimizer(source, model, used, problems)
    left = [name for name in source.tensors if name not in used and not PASSED_OVER.fullmatch(name)]
    problems += [f"left over: {name}" for name in left if optimizer or not STATE.fullmatch(name)]
    if problems:
        raise CheckpointProblem(
            f"{folder} does not fit this model in {len(problems)} places; compare the model flags with those it was "
            f"trained with:\n  {listed(problems)}"
        )
    return Imported(tensors, list(dict.fromkeys(notes)), *_standing(source.common))


def opened(folder: Path) -> Source:
    """The checkpoint of a folder, of whichever kind."""
    try:
        if (folder / "metadata.json").is_file():
            return TorchDist(folder)
        if any(folder.glob(f"mp_rank_*/{FILE}")):
            return PerRank(folder)
    except _OTHER_FORM as error:
        raise CheckpointProblem(
            f"{folder} has another form than Megatron writes ({type(error).__name__}: {error!s:.200}); copy it again"
        ) from error
    raise CheckpointProblem(f"{folder} is no Megatron checkpoint: it has neither metadata.json nor mp_rank_*/{FILE}")


def _check_known(source: Source) -> None:
    """Raises CheckpointProblem for a model that differs from all models here by one kind of parameter."""
    found = next((name for name in source.tensors if name.endswith(QUERY_NORM) and not STATE.fullmatch(name)), None)
    if found is not None:
        raise CheckpointProblem(
            f"{source.folder} holds {found}: with --qk-layernorm and without --q-lora-rank, Megatron-Core since July "
            "2026 normalises the input of linear_q_proj. Models here follow the Hugging Face definition, which has no "
            "such norm, so this checkpoint cannot be imported; train with --q-lora-rank, or without --qk-layernorm"
        )


def _optimizer(
    source: Source, model: Mapping[str, Tensor], used: set[str], problems: list[str]
) -> dict[str, SavedTensor]:
    """Masters, moments and the number of updates. Weights that are wide enough to be their own masters become those."""
    states: dict[tuple[str, str], str] = {}
    for key in source.tensors:
        match = STATE.fullmatch(key)
        if match and match["kind"] in KINDS:
            states[KINDS[match["kind"]], match["name"]] = key
    if not states:
        raise CheckpointProblem(
            f"{source.folder} holds no optimizer state by parameter, which Megatron writes with "
            "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable; leave it out with --no-optimizer"
        )
    tensors = {}
    for kind in dict.fromkeys(KINDS.values()):
        for ours, like in model.items():
            found = next(((states[kind, p.name], p) for p in places(ours) if (kind, p.name) in states), None)
            if found is None:
                problems += [f"missing: {kind} of {ours}"] if not ours.endswith("expert_bias") else []
                continue
            used.add(found[0])
            place = Place(found[0], found[1].layer)
            wide = torch.promote_types(like.dtype, torch.float32)
            key = tensor_key("model" if kind == "master" and like.dtype == wide else kind, ours)
            tensors[key] = _later(source, place, ours, like, wide, problems, [])
    steps = _steps(source.common.get("optimizer"))
    if len(steps) != 1:
        raise CheckpointProblem(f"{source.folder} has {len(steps)} different numbers of updates, expected one")
    tensors[tensor_key("optimizer", "step_count")] = SavedTensor.whole(torch.tensor(steps.pop(), dtype=torch.int64))
    return tensors


def _later(
    source: Source,
    place: Place,
    ours: str,
    like: Tensor,
    dtype: torch.dtype,
    problems: list[str],
    notes: list[str],
) -> SavedTensor:
    """One parameter, in blocks of one expert, read when they are written."""
    theirs, shape = source.tensors[place.name].shape, tuple(like.shape)
    stack = () if place.layer is None else (place.layer,)
    inner = theirs[len(stack) :]
    padded = ours in _VOCABULARY and inner[1:] == shape[1:] and inner != shape
    if inner != shape and not padded or stack and stack[0] >= theirs[0]:
        problems.append(f"shape of {ours}: {list(shape)} here, {list(theirs)} in {place.name}")
        return SavedTensor(shape, ())
    if padded:
        notes.append(f"{ours} has {inner[0]} rows there and {shape[0]} here, padding included")

    def block(offset: tuple[int, ...], size: tuple[int, ...]) -> TensorBox:
        def make() -> Tensor:
            held = (min(size[0], inner[0]), *size[1:]) if padded else size
            data = source.read(place.name, stack + offset, (1,) * len(stack) + held).to(dtype).reshape(held)
            return torch.cat([data, data.new_zeros(size[0] - held[0], *size[1:])]) if padded else data

        return PendingBox(offset, torch.empty(size, dtype=dtype, device="meta"), make)

    if len(shape) == 3:
        return SavedTensor(shape, tuple(block((e, 0, 0), (1, *shape[1:])) for e in range(shape[0])))
    return SavedTensor(shape, (block((0,) * len(shape), shape),))


def _steps(state: Any) -> set[int]:
    """Every `step` of an optimizer's groups, which may be nested deeply or contain themselves."""
    steps: set[int] = set()
    seen: set[int] = set()
    pending = [state]
    while pending:
        value = pending.pop()
        if id(value) in seen or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        if isinstance(value, dict) and isinstance(value.get("step"), (int, float)):
            steps.add(_count(value["step"], "the number of updates"))
        pending += value.values() if isinstance(value, dict) else value
    return steps


def _standing(common: Mapping[str, Any]) -> tuple[int, int]:
    """Iterations done and samples read."""
    samples = getattr(common.get("args"), "consumed_train_samples", 0)
    return _count(common.get("iteration", 0), "iteration"), _count(samples or 0, "consumed_train_samples")


def _count(value: Any, what: str) -> int:
    if not isinstance(value, (int, float)) or not 0 <= value <= _MAX_COUNT or value != int(value):
        raise CheckpointProblem(f"the checkpoint's common state is damaged: {what} is no count up to {_MAX_COUNT}")
    return int(value)
