"""Exports a model as a Hugging Face folder: config.json, tokenizer files, and safetensors files with an index.

Tensors and their order are determined before any value is read. Only one parameter or expert is in memory at a time.
The folder is written under a temporary name and then renamed.
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
from megatron_moe.checkpoint.huggingface.folder import CONFIG, INDEX, SINGLE
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import bytes_of, safetensors_header
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_differences, layer_differences
from megatron_moe.config.text import listed
from megatron_moe.data.tokenizer import llama_tokenizer_config, load_tokenizer, local_copy

SHARD_BYTES = 5 * 10**9
"""Default maximum size in bytes of one weight file. A tensor that is larger gets its own file."""
_COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.tiktoken", "preprocessor_config.json", "LICENSE*"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
)
"""Patterns of the files copied from the template folder. Python files are copied but never executed."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

Read = Callable[[weight_map.WeightMapping], Tensor]
"""Function that reads one unsharded parameter, or one expert's slice of it."""


@dataclass(frozen=True)
class HFTensor:
    """One tensor of the exported folder."""

    name: str
    like: Tensor
    """Meta tensor with the shape and dtype to write."""
    source: str
    """Name of the parameter in this program, followed by `[expert]` if this tensor is part of one expert."""


class Export:
    """Plan of an export: the config.json to write, the weight mappings in file order, and notes for the log.

    Args:
        weights: all parameters and expert biases of the unsharded model by name; only shapes and dtypes are used.
        config: config of that model.
        hf_config: content of a config.json that describes the model.
    Raises:
        CheckpointProblem: the model type has no tensor for a parameter, or `config` differs from `hf_config`.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, hf_config: Mapping[str, Any]) -> None:
        published = model_config_from_hf(hf_config, mtp=config.mtp is not None)
        mappings, unknown = weight_map.map_names(hf_config["model_type"], weights, config, published)
        self._weights = weights
        names = weight_map.names_of(hf_config["model_type"])
        self.mappings = [*mappings, *(() if names.mtp_layers else _copies(mappings, config, published))]
        self.hf_config = _config(hf_config, config, next(iter(weights.values())).dtype)
        problems = [f"no tensor for {name}" for name in unknown]
        expected = with_latent_norms_of(config, published)
        problems += [f"{line} (config.json)" for line in config_differences(config, expected)]
        if config.mtp is not None:
            read = with_latent_norms_of(config, model_config_from_hf(self.hf_config, mtp=True))
            lines = layer_differences(config.mtp_layer, read.mtp_layer)
            problems += [f"layer of multi-token prediction: {line}" for line in lines]
        self.notes = [
            f"{line}: transformers uses the latter for the q and kv latent norms, other readers rms_norm_eps"
            for line in config_differences(expected, published)
        ]
        written = (name for mapping in self.mappings for name in mapping.hf_names)
        of_mtp = sum(names.is_mtp(name, len(config.layers)) for name in written)
        if of_mtp:
            self.notes.append(f"the model class of transformers ignores {of_mtp} tensors of multi-token prediction")
        if published.vocab_size > config.vocab_size:
            problems.append(f"vocabulary: the model has {config.vocab_size} rows, config.json {published.vocab_size}")
        if problems:
            raise CheckpointProblem(
                f"the model cannot be written as {hf_config['model_type']}: {len(problems)} differences from "
                f"config.json; give the config.json that describes it:\n  {listed(problems)}"
            )

    def tensors(self) -> list[HFTensor]:
        """Tensors to export, in file order."""
        tensors = []
        for mapping in self.mappings:
            weight, expert = self._weights[mapping.name], mapping.expert
            value = torch.empty_like(weight if expert is None else weight[0], device="meta")
            source = mapping.name if expert is None else f"{mapping.name}[{expert}]"
            likes = mapping.transform.to_hf(value)
            tensors += [HFTensor(name, like, source) for name, like in zip(mapping.hf_names, likes, strict=True)]
        return tensors

    def stream(self, read: Read) -> Iterator[Tensor]:
        """Yields the values of `tensors()`, reading one parameter or expert at a time."""
        for mapping in self.mappings:
            yield from mapping.transform.to_hf(read(mapping))


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
    """Writes `folder` under a temporary name and renames it. `replace` allows an existing folder.

    Args:
        values: values of `export.tensors()`, in order.
        template: folder whose tokenizer files and generation config are copied.
        shard_bytes: maximum size of one weight file.
    Raises:
        OSError: the folder cannot be written; partially written files are removed.
    """
    storage = storage or Storage()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".tmp-{folder.name}"
    if temporary.exists():
        storage.remove(temporary)
    storage.make_dir(temporary)
    try:
        _write_weights(temporary, export.tensors(), values, shard_bytes, storage)
        _write_json(temporary / CONFIG, export.hf_config, storage)
        for path in sorted({path for pattern in _COPIED for path in template.glob(pattern) if path.is_file()}):
            shutil.copyfile(path, temporary / path.name)
        storage.sync_dir(temporary)
        if replace and folder.exists():
            storage.remove(folder)
        storage.rename(temporary, folder)
    except BaseException:
        storage.remove(temporary)
        raise
    storage.sync_dir(folder.parent)


def write_template(folder: Path, values: Mapping[str, Any], tokenizer: TokenizerConfig) -> None:
    """Writes config.json, generation_config.json and the tokenizer files that transformers can load to `folder`."""
    ends = {} if tokenizer.tokenizer_type == "NullTokenizer" else {"eos_token_id": load_tokenizer(tokenizer).eod}
    _write_json(folder / "config.json", {**values, **ends}, Storage())
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends}, Storage())
    files = tokenizer_files(tokenizer)
    for name, path in files.items():
        (folder / name).write_bytes(path.read_bytes())
    if files and "tokenizer_config.json" not in files:
        model = files.get("tokenizer.model")
        config = llama_tokenizer_config(model) if model else {"tokenizer_class": "PreTrainedTokenizerFast"}
        _write_json(folder / "tokenizer_config.json", config, Storage())


def tokenizer_files(tokenizer: TokenizerConfig) -> dict[str, Path]:
    """Names in an exported folder and paths of the tokenizer's files; empty if transformers cannot load its kind."""
    if tokenizer.tokenizer_model is None:
        return {}
    model = local_copy(tokenizer.tokenizer_model)
    if tokenizer.tokenizer_type == "SentencePieceTokenizer":
        return {"tokenizer.model": model}
    if tokenizer.tokenizer_type != "HuggingFaceTokenizer":
        return {}
    folder = model if model.is_dir() else model.parent
    found = {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    return found | ({"tokenizer.json": model} if model.is_file() else {})


def split_into_files(tensors: Sequence[HFTensor], shard_bytes: int) -> list[list[HFTensor]]:
    """Splits the tensors, in order, into files of at most `shard_bytes` bytes; a larger tensor gets its own file."""
    files: list[list[HFTensor]] = []
    available = 0
    for tensor in tensors:
        size = tensor.like.numel() * tensor.like.element_size()
        if size > available:
            files.append([])
            available = shard_bytes
        files[-1].append(tensor)
        available -= size
    return files


def _write_weights(
    folder: Path, tensors: Sequence[HFTensor], values: Iterator[Tensor], shard_bytes: int, storage: Storage
) -> None:
    files = split_into_files(tensors, shard_bytes)
    weight_files: dict[str, str] = {}
    for number, shard in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        storage.write_file(folder / name, _chunks(shard, values))
        weight_files |= dict.fromkeys((tensor.name for tensor in shard), name)
    if len(files) > 1:
        total = sum(tensor.like.numel() * tensor.like.element_size() for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_files}, storage)


def _chunks(tensors: Sequence[HFTensor], values: Iterator[Tensor]) -> Iterator[bytes | memoryview]:
    yield safetensors_header({tensor.name: tensor.like for tensor in tensors})
    for tensor in tensors:
        value = next(values).to(tensor.like.dtype)
        assert value.shape == tensor.like.shape, f"{tensor.name}: {list(value.shape)}, not {list(tensor.like.shape)}"
        yield bytes_of(value)


def _write_json(path: Path, content: Mapping[str, Any], storage: Storage) -> None:
    storage.write_file(path, [(json.dumps(content, indent=2) + "\n").encode()])


def _copies(
    mappings: Sequence[weight_map.WeightMapping], config: ModelConfig, published: ModelConfig
) -> list[weight_map.WeightMapping]:
    """Mappings for the copies of the embedding and output head that published folders contain in every MTP layer."""
    copies = {"embedding.word_embeddings.weight": weight_map.MTP_EMBEDDING}
    if not config.tied_embeddings:
        copies["output_layer.weight"] = weight_map.MTP_HEAD
    by_name = {mapping.name: mapping for mapping in mappings}
    layers = range(len(published.layers), len(published.layers) + (config.mtp.num_distinct_layers if config.mtp else 0))
    return [
        changed(by_name[name], hf_names=(f"model.layers.{layer}.{suffix}",))
        for layer in layers
        for name, suffix in copies.items()
    ]


def _config(hf_config: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns `hf_config` with the exported dtype and number of MTP layers, and without quantisation."""
    result = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    for name in [name for name in ("dtype", "torch_dtype") if name in result] or ["torch_dtype"]:
        result[name] = str(dtype).removeprefix("torch.")
    num_layers = config.mtp.num_distinct_layers if config.mtp else 0
    key = weight_map.names_of(hf_config["model_type"]).mtp_count
    if num_layers or result.get(key):
        result[key] = num_layers
    return result
