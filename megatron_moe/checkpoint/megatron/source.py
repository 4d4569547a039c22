"""Maps the tensors of Megatron checkpoints to our parameter names.

Megatron may stack identical layers along a new dim 0 and omit the layer number from the name. Transformer Engine may
fuse a norm into the linear layer that follows it, which changes the name of the norm's weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.fsdp_dtensor import FSDPDTensor
from megatron_moe.checkpoint.megatron.per_rank import FILE, LAYER, PerRank
from megatron_moe.checkpoint.megatron.torch_dist import TorchDist
from megatron_moe.checkpoint.tensor_shards import PendingBox, TensorBox, TensorShard, tensor_key
from megatron_moe.config.component import MegatronName
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.text import listed

Source = TorchDist | FSDPDTensor | PerRank
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError, OSError)
"""Exceptions that opening a malformed checkpoint can raise."""
_MAX_COUNT = 1 << 48
_VOCABULARY = frozenset(("embedding.word_embeddings.weight", "output_layer.weight"))
_MTP_LAYER = re.compile(r"(?P<depth>mtp\.layers\.\d+)\.transformer_layer\.(?P<rest>.+)")
_OUTSIDE_LAYERS = re.compile(r"(?P<module>decoder|mtp\.layers\.\d+)\.(?P<rest>.+)")
_TABLE = ".router.expert_table"
"""Name suffix of the tables that map token ids to experts."""

_QUERY_NORM = "self_attention.linear_q_proj.layer_norm_weight"
"""Name suffix of a norm that our models lack: Megatron-Core adds it to multi-latent attention without a q latent."""

_STATE = re.compile(r"(chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)")
"""Pattern of the keys of per-parameter optimizer state."""

_KINDS: Mapping[str, str] = MappingProxyType(
    {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
)
"""Maps Megatron's name of each kind of optimizer state to the name in this program's checkpoints."""

_IGNORED = re.compile(r".*(_extra_state|rng_state).*|.*\.rotary_pos_emb\.inv_freq|.*local_tokens_per_expert")
"""Pattern of tensors that are not parameters: Transformer Engine and RNG state, RoPE tables, counters."""


@dataclass(frozen=True)
class Location:
    """Megatron tensors that hold one of our parameters."""

    names: tuple[str, ...]
    """Names of the tensors, which are concatenated along their last dim; usually one."""
    layer: int | None = None
    """Index along dim 0 if the tensors stack all layers; else None."""


def _candidate_locations(name: str, other_names: Mapping[str, tuple[MegatronName, ...]]) -> Iterator[Location]:
    """Yields the tensors in which Megatron may store the parameter `name`. `other_names`: see `import_model`."""

    def locations_in_module(module: str, rest: str, layer: int | None = None) -> Iterator[Location]:
        for each in (rest, *other_names.get(rest, ())):
            parts = (each,) if isinstance(each, str) else each
            yield Location(tuple(f"{module}.{part}" for part in parts), layer)

    decoder, mtp = LAYER.fullmatch(name), _MTP_LAYER.fullmatch(name)
    outside = _OUTSIDE_LAYERS.fullmatch(name)
    if decoder is not None:
        yield from locations_in_module(f"decoder.layers.{decoder['layer']}", decoder["rest"])
        yield from locations_in_module("decoder.layers", decoder["rest"], int(decoder["layer"]))
    elif mtp is not None:
        for inner in ("transformer_layer", "mtp_model_layer"):
            yield from locations_in_module(f"{mtp['depth']}.{inner}", mtp["rest"])
    elif outside is not None:
        yield from locations_in_module(outside["module"], outside["rest"])
    else:
        yield Location((name,))


@dataclass
class ImportedModel:
    """Model imported from a Megatron checkpoint. The values of `tensors` are read only when they are saved."""

    tensors: dict[str, TensorShard]
    notes: list[str]
    iteration: int
    consumed_samples: int


def import_model(
    source: Source, model: Mapping[str, Tensor], other_names: Mapping[str, tuple[MegatronName, ...]], *, optimizer: bool
) -> ImportedModel:
    """Maps a checkpoint to the parameters and buffers in `model` and, with `optimizer`, to their optimizer state.

    `other_names`: see `ModelConfig.megatron_names`.

    Raises CheckpointProblem that lists all tensors that are missing, unexpected, or have a wrong shape.
    """
    folder = source.folder
    found = next((name for name in source.tensors if name.endswith(_QUERY_NORM) and not _STATE.fullmatch(name)), None)
    if found is not None:
        raise CheckpointProblem(
            f"{folder} holds {found}: with --qk-layernorm and without --q-lora-rank, Megatron-Core since July 2026 "
            "normalises the input of linear_q_proj. This program follows the Hugging Face definition without that norm "
            "and cannot import the checkpoint; train with --q-lora-rank, or without --qk-layernorm"
        )
    if optimizer and isinstance(source, PerRank):
        raise CheckpointProblem(
            f"{folder} has one folder per rank, whose optimizer state cannot be read; import its weights with "
            "--no-optimizer, or convert it with Megatron's --ckpt-convert-format torch_dist"
        )
    used: set[str] = set()
    problems: list[str] = []
    tensors: dict[str, TensorShard] = {}
    notes: list[str] = []
    locations = {name: tuple(_candidate_locations(name, other_names)) for name in model}
    for name, like in model.items():
        location = next((found for found in locations[name] if source.tensors.keys() >= {*found.names}), None)
        if location is None:
            problems.append(f"missing: {name}")
            continue
        used.update(location.names)
        tensors[tensor_key("model", name)] = _pending(source, location, name, like, like.dtype, problems, notes)
    if optimizer:
        tensors |= _optimizer(source, model, locations, used, problems)
    unused = [name for name in source.tensors if name not in used and not _IGNORED.fullmatch(name)]
    problems += [f"left over: {name}" for name in unused if optimizer or not _STATE.fullmatch(name)]
    if problems:
        raise CheckpointProblem(
            f"{folder} does not fit this model in {len(problems)} places; compare the model flags with those it was "
            f"trained with:\n  {listed(problems)}"
        )
    samples = getattr(source.common.get("args"), "consumed_train_samples", 0)
    return ImportedModel(
        tensors,
        list(dict.fromkeys(notes)),
        iteration=_count(source.common.get("iteration", 0), "iteration"),
        consumed_samples=_count(samples or 0, "consumed_train_samples"),
    )


def open_megatron(folder: Path) -> Source:
    """Opens a torch_dist, fsdp_dtensor or per-rank checkpoint. Raises CheckpointProblem if `folder` is none of them."""
    try:
        if (folder / "metadata.json").is_file():
            return TorchDist(folder)
        if any(folder.glob(f"mp_rank_*/{FILE}")):
            return PerRank(folder)
        if (folder / ".metadata").is_file():
            return FSDPDTensor(folder)
    except _MALFORMED as error:
        raise CheckpointProblem(
            f"{folder} is a malformed Megatron checkpoint ({type(error).__name__}: {error!s:.200}); copy it again"
        ) from error
    raise CheckpointProblem(f"{folder} is not a Megatron checkpoint: it has neither .metadata nor mp_rank_*/{FILE}")


def _optimizer(
    source: Source,
    model: Mapping[str, Tensor],
    locations: Mapping[str, Sequence[Location]],
    used: set[str],
    problems: list[str],
) -> dict[str, TensorShard]:
    """Maps master weights, moments and the step count. Weights that are fp32 are replaced by their master weights."""
    states: dict[tuple[str, str], str] = {}
    for key in source.tensors:
        match = _STATE.fullmatch(key)
        if match and match["kind"] in _KINDS:
            states[_KINDS[match["kind"]], match["name"]] = key
    if not states:
        raise CheckpointProblem(
            f"{source.folder} holds no per-parameter optimizer state, which Megatron writes with "
            "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable; import the weights with --no-optimizer"
        )
    tensors = {}
    for kind in dict.fromkeys(_KINDS.values()):
        for name, like in model.items():
            keys = ((place, [states.get((kind, each)) for each in place.names]) for place in locations[name])
            found = (Location(tuple(filter(None, names)), place.layer) for place, names in keys if all(names))
            location = next(found, None)
            if location is None:
                problems += [f"missing: {kind} of {name}"] if not name.endswith(("expert_bias", _TABLE)) else []
                continue
            used.update(location.names)
            dtype = torch.promote_types(like.dtype, torch.float32)
            key = tensor_key("model" if kind == "master" and like.dtype == dtype else kind, name)
            tensors[key] = _pending(source, location, name, like, dtype, problems, [])
    steps = _steps(source.common.get("optimizer"))
    if len(steps) != 1:
        raise CheckpointProblem(f"{source.folder} has {len(steps)} different optimizer step counts, expected one")
    tensors[tensor_key("optimizer", "step_count")] = TensorShard.whole(torch.tensor(steps.pop(), dtype=torch.int64))
    return tensors


def _pending(
    source: Source,
    location: Location,
    name: str,
    like: Tensor,
    dtype: torch.dtype,
    problems: list[str],
    notes: list[str],
) -> TensorShard:
    """Builds the shard of one parameter. Its values are read when it is saved; stacked experts are read one by one."""
    shapes, shape = [tuple(source.tensors[each].shape) for each in location.names], tuple(like.shape)
    stored = (*shapes[0][:-1], sum(each[-1] for each in shapes)) if shapes[1:] else shapes[0]
    stack = () if location.layer is None else (location.layer,)
    inner = stored[len(stack) :]
    is_vocabulary = name in _VOCABULARY or name.endswith(_TABLE)
    padded = is_vocabulary and inner[1:] == shape[1:] and inner != shape
    if inner != shape and not padded or stack and stack[0] >= stored[0]:
        where = " and ".join(location.names)
        problems.append(f"shape of {name}: {list(shape)} in the model, {list(stored)} in {where}")
        return TensorShard(shape, ())
    if padded:
        notes.append(f"{name} has {inner[0]} rows in the checkpoint and {shape[0]} in the model, including padding")

    def pending_box(offset: tuple[int, ...], size: tuple[int, ...]) -> TensorBox:
        def read_box() -> Tensor:
            read = (min(size[0], inner[0]), *size[1:]) if padded else size
            parts = [read] if not shapes[1:] else [(*read[:-1], each[-1]) for each in shapes]
            data = torch.cat(
                [
                    source.read(each, stack + offset, (1,) * len(stack) + part).to(dtype).reshape(part)
                    for each, part in zip(location.names, parts, strict=True)
                ],
                dim=-1,
            )
            return torch.cat([data, data.new_zeros(size[0] - read[0], *size[1:])]) if padded else data

        return PendingBox(offset, torch.empty(size, dtype=dtype, device="meta"), read_box)

    if len(shape) == 3:
        return TensorShard(shape, tuple(pending_box((e, 0, 0), (1, *shape[1:])) for e in range(shape[0])))
    return TensorShard(shape, (pending_box((0,) * len(shape), shape),))


def _steps(state: Any) -> set[int]:
    """Collects the distinct values of `step` in all parameter groups. The nesting of `state` may be deep or cyclic."""
    steps: set[int] = set()
    seen: set[int] = set()
    pending = [state]
    while pending:
        value = pending.pop()
        if id(value) in seen or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        if isinstance(value, dict) and isinstance(value.get("step"), (int, float)):
            steps.add(_count(value["step"], "the optimizer step count"))
        pending += value.values() if isinstance(value, dict) else value
    return steps


def _count(value: Any, what: str) -> int:
    if not isinstance(value, (int, float)) or not 0 <= value <= _MAX_COUNT or value != int(value):
        raise CheckpointProblem(f"the checkpoint's common state is damaged: {what} is not a count up to {_MAX_COUNT}")
    return int(value)
