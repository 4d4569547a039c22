"""Between our checkpoints and Hugging Face folders, on a CPU, one parameter or one expert at a time.

Both ways everything is checked first: names, shapes and element types on both sides, and every byte of a checkpoint of
ours against its checksum. Element types stay as they are, tensor by tensor.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.checkpoint.huggingface import weight_map
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.export import (
    SHARD_BYTES,
    Export,
    write_folder,
)
from megatron_moe.checkpoint.huggingface.folder import HFFolder, read_config
from megatron_moe.checkpoint.huggingface.load import (
    fitting,
    notes,
    weight_tensors,
)
from megatron_moe.checkpoint.manifest import Manifest
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import (
    TORCH_DTYPES,
    FileReader,
    PendingBox,
    SavedTensor,
    TensorBox,
    dtype_name,
    fill,
    is_weight,
    tensor_key,
)
from megatron_moe.checkpoint.verify import open_verified
from megatron_moe.config.exit_codes import (
    CheckpointProblem,
    EnvironmentProblem,
    listed,
)
from megatron_moe.config.model import ModelConfig
from megatron_moe.parallel.context import ParallelContext


@dataclass(frozen=True)
class ConversionRow:
    """One tensor of the Hugging Face side."""

    theirs: str
    dtype: str
    shape: tuple[int, ...]
    ours: str


@dataclass
class ConversionReport:
    """What a conversion did."""

    source: Path
    target: Path
    rows: list[ConversionRow]
    seconds: float
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Markdown: the notes, and a table of all tensors."""
        head = [
            f"# {self.source} -> {self.target}",
            "",
            f"{len(self.rows)} tensors in {self.seconds:.1f} s.",
            "",
            *(f"- {note}" for note in self.notes),
            "",
            "| Hugging Face | type | shape | here |",
            "|---|---|---|---|",
        ]
        return (
            "\n".join([*head, *(f"| {r.theirs} | {r.dtype} | {list(r.shape)} | {r.ours} |" for r in self.rows)]) + "\n"
        )


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
    """Writes the weights of a checkpoint `iter_NNNNNNN` of ours as a Hugging Face folder.

    Args:
        output: must not exist.
        model: the whole model of `spec` on the meta device.
        template: folder with the config.json that describes it; tokenizer files go along.
        dtype: element type of the folder; None: every tensor keeps its own.
    Raises:
        CheckpointProblem: the checkpoint is damaged, or its tensors are not those of the model or of the config.
        EnvironmentProblem: the folder exists, or cannot be written.
    """
    started = time.monotonic()
    if output.exists():
        raise EnvironmentProblem(f"{output} exists; give a folder that does not, or remove it")
    hf_config = read_config(template)
    manifest, reader = open_verified(checkpoint)
    weights = _stored_weights(checkpoint, manifest, model, dtype)
    export = Export(weights, config, hf_config)
    try:
        read = partial(_read, manifest, reader)
        write_folder(output, export, export.stream(read), template, shard_bytes=shard_bytes)
    except OSError as error:
        raise EnvironmentProblem(
            f"{output} could not be written: {error.strerror}; make room or give another"
        ) from error
    rows = [ConversionRow(t.name, dtype_name(t.like.dtype), tuple(t.like.shape), t.ours) for t in export.tensors()]
    padding = config.vocab_size - model_config_from_hf(hf_config).vocab_size
    remarks = [f"{padding} padding rows of the vocabulary were left out"] if padding else []
    remarks += export.notes
    return ConversionReport(checkpoint, output, rows, time.monotonic() - started, remarks)


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
        model: the whole model of `spec` on the meta device.
        train_state: of a run that has not begun.
        texts: further files of the checkpoint, such as run.yaml.
    Raises:
        CheckpointProblem: a tensor is missing, left over, or of another shape, or repeats another with other values.
        EnvironmentProblem: the checkpoint cannot be written.
    """
    started = time.monotonic()
    if list_checkpoints(save):
        raise EnvironmentProblem(f"{save} holds checkpoints already; give another folder")
    hf_config = read_config(folder)
    published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
    targets = weight_tensors(model)
    with ExitStack() as stack:
        source = HFFolder(folder, hf_config, stack)
        counterparts, ignored = fitting(folder, source, hf_config["model_type"], targets, config, published)
        _check_ignored(folder, source, ignored)
        rows = [ConversionRow(n, source.dtype(n), source.shape(n), c.ours) for c in counterparts for n in c.theirs]
        tensors = _later(counterparts, targets, source)
        saver = CheckpointSaver(save, ParallelContext.single(), stop_after=1, say=say)
        stack.callback(saver.close)
        path = saver.save(0, tensors, train_state, texts=texts)
    assert path is not None, "a save that fails once raises"
    return ConversionReport(folder, path, rows, time.monotonic() - started, notes(config, published, ignored))


def _later(
    counterparts: list[weight_map.Counterpart], targets: Mapping[str, Tensor], source: HFFolder
) -> dict[str, SavedTensor]:
    """Every target as blocks that are read when they are written: one for each expert, or the whole."""
    by_target: dict[str, list[weight_map.Counterpart]] = {}
    for counterpart in counterparts:
        by_target.setdefault(counterpart.ours, []).append(counterpart)
    tensors = {}
    for ours, parts in by_target.items():
        shape = tuple(targets[ours].shape)
        dtype = TORCH_DTYPES[source.dtype(parts[0].theirs[0])]
        for name in (name for part in parts for name in part.theirs):
            dtype = torch.promote_types(dtype, TORCH_DTYPES[source.dtype(name)])
        boxes = tuple(_later_box(part, shape, dtype, source) for part in parts)
        tensors[tensor_key("model", ours)] = SavedTensor(shape, boxes)
    return tensors


def _later_box(part: weight_map.Counterpart, shape: tuple[int, ...], dtype: torch.dtype, source: HFFolder) -> TensorBox:
    block = shape if part.expert is None else (1, *shape[1:])
    offset = (0,) * len(shape) if part.expert is None else (part.expert, *(0 for _ in shape[1:]))

    def make() -> Tensor:
        return part.transform.to_ours([source.tensor(name) for name in part.theirs]).to(dtype).reshape(block)

    return PendingBox(offset, torch.empty(block, dtype=dtype, device="meta"), make)


def _check_ignored(folder: Path, source: HFFolder, ignored: list[str]) -> None:
    """What is left out can be made again: copies that equal what they repeat, and rotation tables."""
    problems = []
    for name in ignored:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        original = "model.embed_tokens.weight"
        if name.endswith(weight_map.MTP_HEAD) and "lm_head.weight" in source.names:
            original = "lm_head.weight"
        if not name.endswith((weight_map.MTP_EMBEDDING, weight_map.MTP_HEAD, "lm_head.weight")):
            problems.append(f"left over: {name}")
        elif not torch.equal(source.tensor(name), source.tensor(original)):
            problems.append(f"{name} is not equal to {original}, which it should repeat")
    if problems:
        raise CheckpointProblem(
            f"{folder}: {len(problems)} tensors would be lost; for layers of multi-token prediction give "
            f"--mtp-num-layers:\n  {listed(problems)}"
        )


def _stored_weights(
    checkpoint: Path, manifest: Manifest, model: nn.Module, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The weights of the model with the element types of the checkpoint, on the meta device.

    Raises CheckpointProblem when the tensors of the checkpoint are not those of the model.
    """
    state = {tensor_key("model", name): value for name, value in model.state_dict().items()}
    stored = {key: entry for key, entry in manifest.tensors.items() if is_weight(key)}
    problems = [f"missing in the checkpoint: {key}" for key in state if key not in stored]
    problems += [f"unknown to the model: {key}" for key in stored if key not in state]
    problems += [
        f"shape of {key}: {list(stored[key].shape)} in the checkpoint, {list(value.shape)} in the model"
        for key, value in state.items()
        if key in stored and stored[key].shape != tuple(value.shape)
    ]
    if problems:
        raise CheckpointProblem(
            f"checkpoint {checkpoint} is not of this model, in {len(problems)} tensors:\n  {listed(problems)}"
        )
    types = {name: TORCH_DTYPES[stored[tensor_key("model", name)].dtype] for name in weight_tensors(model)}
    if dtype is not None:  # biases that steer the router stay as they are: their steps vanish in bf16
        types |= {name: dtype for name, _ in model.named_parameters()}
    return {name: torch.empty_like(value, dtype=types[name]) for name, value in weight_tensors(model).items()}


def _read(manifest: Manifest, reader: FileReader, counterpart: weight_map.Counterpart) -> Tensor:
    """A parameter, or the slice of one expert, out of whatever pieces it is stored in."""
    entry = manifest.tensors[tensor_key("model", counterpart.ours)]
    shape, offset = entry.shape, (0,) * len(entry.shape)
    if counterpart.expert is not None:
        shape, offset = (1, *shape[1:]), (counterpart.expert, *offset[1:])
    data = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    fill(SavedTensor(entry.shape, (TensorBox(offset, data),)), entry, lambda piece, out: reader.mapped(entry, piece))
    return data if counterpart.expert is None else data[0]
