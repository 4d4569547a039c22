"""A model as a Hugging Face folder: config.json, tokenizer files, and weights in safetensors files with an index.

What is written, and in which order, is known before the first number is read. Then one parameter, or one expert of it,
at a time passes through memory. The folder appears whole or not at all.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.huggingface import weight_map
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.checkpoint.huggingface.folder import (
    CONFIG,
    INDEX,
    SINGLE,
)
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import bytes_of, safetensors_header
from megatron_moe.config.exit_codes import CheckpointProblem, listed
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import differences

SHARD_BYTES = 5 * 10**9
"""Of one file, unless asked otherwise; a single tensor may be larger."""
_COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.tiktoken", "preprocessor_config.json", "LICENSE*"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
)
"""Files that go along as they are. Code is copied and not run."""
_PREDICTION_LAYERS = "num_nextn_predict_layers"

Read = Callable[[weight_map.Counterpart], Tensor]
"""One of our parameters, or the slice of one expert."""


@dataclass(frozen=True)
class HFTensor:
    """One tensor of the folder."""

    name: str
    like: Tensor
    """On the meta device: its shape and element type."""
    ours: str
    """Where it comes from."""


class Export:
    """The tensors of a model by Hugging Face name.

    Args:
        weights: every parameter and expert bias of the whole model by name; shapes and element types are used.
        spec: of that model.
        config: config.json of the folder to be; `config` then is the one to write, and `notes` what is worth showing.
    Raises:
        CheckpointProblem: the model type has no place for a parameter, or the model is not the one of the config.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, hf_config: Mapping[str, Any]) -> None:
        published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
        counterparts, unknown = weight_map.map_names(hf_config["model_type"], weights, config, published)
        self._weights = weights
        self.counterparts = [*counterparts, *_copies(counterparts, config, published)]
        self.hf_config = _config(hf_config, config, next(iter(weights.values())).dtype)
        problems = [f"no place for {name}" for name in unknown]
        against = with_latent_norms_of(config, published)
        problems += [f"{line} (config.json)" for line in differences(config, against)]
        self.notes = [
            f"{line}: transformers norms compressed q and kv with the latter, other readers with rms_norm_eps"
            for line in differences(against, published)
        ]
        if published.vocab_size > config.vocab_size:
            problems.append(f"vocabulary: {config.vocab_size} rows, config.json has {published.vocab_size}")
        if problems:
            raise CheckpointProblem(
                f"the model cannot be written as {hf_config['model_type']} with this config.json, in {len(problems)} "
                f"places; "
                f"give the config.json that describes it:\n  {listed(problems)}"
            )

    def tensors(self) -> list[HFTensor]:
        """What is written, in order."""
        return [tensor for counterpart in self.counterparts for tensor in self._tensors(counterpart)]

    def stream(self, read: Read) -> Iterator[Tensor]:
        """The values of `tensors()`, one parameter or expert at a time."""
        for counterpart in self.counterparts:
            yield from counterpart.transform.to_theirs(read(counterpart))

    def _tensors(self, counterpart: weight_map.Counterpart) -> Iterator[HFTensor]:
        whole = self._weights[counterpart.ours]
        one = torch.empty_like(whole if counterpart.expert is None else whole[0], device="meta")
        expert = "" if counterpart.expert is None else f"[{counterpart.expert}]"
        for name, like in zip(counterpart.theirs, counterpart.transform.to_theirs(one), strict=True):
            yield HFTensor(name, like, f"{counterpart.ours}{expert}")


def write_folder(
    folder: Path,
    export: Export,
    values: Iterator[Tensor],
    template: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    storage: Storage | None = None,
) -> None:
    """Writes `folder` aside and renames it. With `replace` it may exist.

    Args:
        values: of `export.tensors()`, one after the other.
        template: folder whose tokenizer files and generation config are copied.
    Raises:
        OSError: it cannot be written; nothing is left then.
    """
    storage = storage or Storage()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".tmp-{folder.name}"
    if aside.exists():
        storage.remove(aside)
    storage.make_dir(aside)
    try:
        _write_weights(aside, export.tensors(), values, shard_bytes, storage)
        _write_json(aside / CONFIG, export.hf_config, storage)
        for path in companions(template):
            shutil.copyfile(path, aside / path.name)
        storage.sync_dir(aside)
        if replace and folder.exists():
            storage.remove(folder)
        storage.rename(aside, folder)
    except BaseException:
        storage.remove(aside)
        raise
    storage.sync_dir(folder.parent)


def companions(folder: Path) -> list[Path]:
    """Tokenizer files and their like."""
    return sorted({path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()})


def shards(tensors: Sequence[HFTensor], shard_bytes: int) -> list[list[HFTensor]]:
    """The tensors in order, in files of at most so many bytes, or of one tensor."""
    files: list[list[HFTensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.like.numel() * tensor.like.element_size()
        if size > room:
            files.append([])
            room = shard_bytes
        files[-1].append(tensor)
        room -= size
    return files


def _write_weights(
    folder: Path, tensors: Sequence[HFTensor], values: Iterator[Tensor], shard_bytes: int, storage: Storage
) -> None:
    files = shards(tensors, shard_bytes)
    place: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        storage.write_file(folder / name, _chunks(held, values))
        place |= dict.fromkeys((tensor.name for tensor in held), name)
    if len(files) > 1:
        total = sum(tensor.like.numel() * tensor.like.element_size() for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place}, storage)


def _chunks(tensors: Sequence[HFTensor], values: Iterator[Tensor]) -> Iterator[bytes | memoryview]:
    yield safetensors_header({tensor.name: tensor.like for tensor in tensors})
    for tensor in tensors:
        value = next(values).to(tensor.like.dtype)
        assert value.shape == tensor.like.shape, f"{tensor.name}: {list(value.shape)}, not {list(tensor.like.shape)}"
        yield bytes_of(value)


def _write_json(path: Path, content: Mapping[str, Any], storage: Storage) -> None:
    storage.write_file(path, [(json.dumps(content, indent=2) + "\n").encode()])


def _copies(
    counterparts: Sequence[weight_map.Counterpart], config: ModelConfig, published: ModelConfig
) -> list[weight_map.Counterpart]:
    """Embedding and head once more for every layer of multi-token prediction: published folders repeat them."""
    head = "embedding.word_embeddings.weight" if config.tied_embeddings else "output_layer.weight"
    of_layer = {"embedding.word_embeddings.weight": weight_map.MTP_EMBEDDING, head: weight_map.MTP_HEAD}
    if config.tied_embeddings:
        of_layer = {head: weight_map.MTP_EMBEDDING}
    known = {counterpart.ours: counterpart for counterpart in counterparts}
    layers = range(len(published.layers), len(published.layers) + (config.mtp.num_layers if config.mtp else 0))
    return [
        changed(known[ours], theirs=(f"model.layers.{layer}.{suffix}",))
        for layer in layers
        for ours, suffix in of_layer.items()
    ]


def _config(hf_config: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config of the folder, of weights in `dtype` that are not quantised."""
    made = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    for name in [name for name in ("dtype", "torch_dtype") if name in made] or ["torch_dtype"]:
        made[name] = str(dtype).removeprefix("torch.")
    num_layers = config.mtp.num_layers if config.mtp else 0
    if num_layers or made.get(_PREDICTION_LAYERS):
        made[_PREDICTION_LAYERS] = num_layers
    return made
