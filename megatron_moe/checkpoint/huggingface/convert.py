"""Converts between checkpoints and Hugging Face folders on CPU, holding one parameter or expert in memory at a time.

Names, shapes and dtypes are verified before anything is written, and so are the checksums of a source checkpoint.
Tensors keep their dtypes unless another dtype is requested.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.checkpoint.huggingface import weight_map
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.export import SHARD_BYTES, Export, write_folder
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.checkpoint.huggingface.load import UNREAD, MatchedWeights, match_weights, weight_tensors
from megatron_moe.checkpoint.load import tensor_mismatches
from megatron_moe.checkpoint.manifest import TORCH_DTYPES, Manifest
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import (
    CheckpointReader,
    PendingBox,
    TensorBox,
    TensorShard,
    dtype_name,
    fill_shard,
    tensor_key,
)
from megatron_moe.checkpoint.verify import open_verified
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.text import listed
from megatron_moe.parallel.context import ParallelContext


@dataclass(frozen=True)
class ConversionRow:
    """One converted Hugging Face tensor; `name` is the parameter in the checkpoint."""

    hf_name: str
    dtype: str
    shape: tuple[int, ...]
    name: str


@dataclass
class ConversionReport:
    """Tensors and notes of a conversion, for the file conversion.md."""

    source: Path
    target: Path
    rows: list[ConversionRow]
    seconds: float
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Formats the notes and a table of all tensors as Markdown."""
        lines = [
            f"# {self.source} -> {self.target}",
            "",
            f"{len(self.rows)} tensors in {self.seconds:.1f} s.",
            "",
            *(f"- {note}" for note in self.notes),
            "",
            "| Hugging Face | dtype | shape | checkpoint |",
            "|---|---|---|---|",
            *(f"| {row.hf_name} | {row.dtype} | {list(row.shape)} | {row.name} |" for row in self.rows),
        ]
        return "\n".join(lines) + "\n"


def to_hf(
    checkpoint: Path,
    output: Path,
    model: nn.Module,
    config: ModelConfig,
    template: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Writes the weights of a checkpoint `iter_NNNNNNN` as a Hugging Face folder.

    Args:
        output: must not exist.
        model: the unsharded model of `config` on the meta device.
        template: folder with the config.json that describes the model; its tokenizer files are copied.
        dtype: dtype of the written weights; None keeps the dtype of every tensor.
    Raises:
        CheckpointProblem: the checkpoint is damaged, or its tensors do not match the model or the config.json.
        EnvironmentProblem: `output` exists or cannot be written.
    """
    started = time.monotonic()
    if output.exists():
        raise EnvironmentProblem(f"{output} exists; remove it or give another folder")
    hf_config = read_config(template)
    reader = open_verified(checkpoint)
    export = Export(_stored_weights(checkpoint, reader.manifest, model, dtype), config, hf_config)
    try:
        write_folder(output, export, export.stream(partial(_read, reader)), template, shard_bytes=shard_bytes)
    except OSError as error:
        raise EnvironmentProblem(
            f"{output} could not be written: {error.strerror}; free disk space or give another folder"
        ) from error
    rows = [ConversionRow(t.name, dtype_name(t.like.dtype), tuple(t.like.shape), t.source) for t in export.tensors()]
    padding = config.vocab_size - model_config_from_hf(hf_config).vocab_size
    notes = [f"{padding} padding rows of the vocabulary were left out"] if padding else []
    notes += export.notes
    return ConversionReport(checkpoint, output, rows, time.monotonic() - started, notes)


def from_hf(
    folder: Path,
    save: Path,
    model: nn.Module,
    config: ModelConfig,
    train_state: Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    say: Callable[[str], None] = print,
) -> ConversionReport:
    """Writes the weights of a Hugging Face folder as the checkpoint of iteration 0 in the folder `save`.

    Args:
        model: the unsharded model of `config` on the meta device.
        train_state: initial training state.
        texts: additional text files of the checkpoint, such as run.yaml.
    Raises:
        CheckpointProblem: a tensor is missing, unexpected or misshapen, or copies of a shared tensor differ.
        EnvironmentProblem: the checkpoint cannot be written.
    """
    started = time.monotonic()
    if list_checkpoints(save):
        raise EnvironmentProblem(f"{save} holds checkpoints already; give another folder")
    with ExitStack() as stack:
        weights = match_weights(folder, model, config, stack)
        source = weights.source
        _check_ignored(folder, source, weights.ignored)
        rows = [
            ConversionRow(name, source.dtype(name), source.shape(name), mapping.name)
            for mapping in weights.mappings
            for name in mapping.hf_names
        ]
        tensors = _pending_tensors(weights)
        saver = CheckpointSaver(save, ParallelContext.single(), stop_after=1, say=say)
        stack.callback(saver.close)
        path = saver.save(0, tensors, train_state, texts=texts)
    assert path is not None, "stop_after=1: a failed save raises"
    return ConversionReport(folder, path, rows, time.monotonic() - started, weights.notes)


def _pending_tensors(weights: MatchedWeights) -> dict[str, TensorShard]:
    """Tensors to save, by checkpoint key. Each parameter or expert is read only when it is written."""
    by_target: dict[str, list[weight_map.WeightMapping]] = {}
    for mapping in weights.mappings:
        by_target.setdefault(mapping.name, []).append(mapping)
    tensors = {}
    for target, parts in by_target.items():
        shape = tuple(weights.targets[target].shape)
        dtypes = [TORCH_DTYPES[weights.source.dtype(name)] for part in parts for name in part.hf_names]
        dtype = reduce(torch.promote_types, dtypes)
        if not dtype.is_floating_point:  # a table of ids, whose width differs between folders
            dtype = weights.targets[target].dtype
        boxes = tuple(_pending_box(part, shape, dtype, weights.source) for part in parts)
        tensors[tensor_key("model", target)] = TensorShard(shape, boxes)
    return tensors


def _pending_box(
    part: weight_map.WeightMapping, shape: tuple[int, ...], dtype: torch.dtype, source: HFFolder
) -> TensorBox:
    offset, block = _extent(part, shape)

    def read_parameter() -> Tensor:
        return part.transform.from_hf([source.tensor(name) for name in part.hf_names]).to(dtype).reshape(block)

    return PendingBox(offset, torch.empty(block, dtype=dtype, device="meta"), read_parameter)


def _extent(part: weight_map.WeightMapping, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape, in the checkpoint tensor, of the mapped parameter or of one expert's slice of it."""
    if part.expert is None:
        return (0,) * len(shape), shape
    return (part.expert, *(0 for _ in shape[1:])), (1, *shape[1:])


def _check_ignored(folder: Path, source: HFFolder, ignored: list[str]) -> None:
    """Raises CheckpointProblem unless each ignored tensor is `UNREAD` or equals the embedding or output head."""
    problems = []
    for name in ignored:
        if UNREAD.fullmatch(name):
            continue
        original = "model.embed_tokens.weight"
        if name.endswith(weight_map.MTP_HEAD) and "lm_head.weight" in source.names:
            original = "lm_head.weight"
        if not name.endswith((weight_map.MTP_EMBEDDING, weight_map.MTP_HEAD, "lm_head.weight")):
            problems.append(f"left over: {name}")
        elif not torch.equal(source.tensor(name), source.tensor(original)):
            problems.append(f"{name} is not equal to {original}, of which it should be a copy")
    if problems:
        raise CheckpointProblem(
            f"{folder}: {len(problems)} tensors would not be converted; for MTP layers give --mtp-num-layers:\n  "
            f"{listed(problems)}"
        )


def _stored_weights(
    checkpoint: Path, manifest: Manifest, model: nn.Module, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Meta tensors of the weights by name. `dtype`: dtype of all parameters; None means their dtypes in the checkpoint.

    Raises CheckpointProblem if the checkpoint's weights do not match the model.
    """
    state = {tensor_key("model", name): TensorShard.whole(value) for name, value in model.state_dict().items()}
    problems = tensor_mismatches(state, frozenset(), manifest, casting=True)
    if problems:
        raise CheckpointProblem(
            f"checkpoint {checkpoint} does not match the model in {len(problems)} tensors:\n  {listed(problems)}"
        )
    dtypes = {name: TORCH_DTYPES[manifest.tensors[tensor_key("model", name)].dtype] for name in weight_tensors(model)}
    if dtype is not None:  # expert biases keep fp32, because their updates would be too small for bf16
        dtypes |= {name: dtype for name, _ in model.named_parameters()}
    return {name: torch.empty_like(value, dtype=dtypes[name]) for name, value in weight_tensors(model).items()}


def _read(reader: CheckpointReader, mapping: weight_map.WeightMapping) -> Tensor:
    """Reads a parameter, or one expert's slice of it, from the checkpoint."""
    key = tensor_key("model", mapping.name)
    entry = reader.manifest.tensors[key]
    offset, shape = _extent(mapping, entry.shape)
    data = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    fill_shard(
        TensorShard(entry.shape, (TensorBox(offset, data),)), entry, lambda piece, _: reader.mmap_piece(key, piece)
    )
    return data if mapping.expert is None else data[0]
