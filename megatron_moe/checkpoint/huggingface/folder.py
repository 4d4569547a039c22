"""Reads a local Hugging Face folder: config.json and safetensors files, with or without an index.

Pickled weights (.bin) are not read and code of the folder is not executed. Quantised weights, as published by DeepSeek,
are dequantised to bf16: FP8 in blocks, and the packed FP4 of DeepSeek-V4's experts.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_moe.checkpoint.huggingface.config_reader import language_model
from megatron_moe.checkpoint.huggingface.weight_map import names_of
from megatron_moe.checkpoint.manifest import MAX_HEADER_BYTES
from megatron_moe.checkpoint.storage import read_bounded
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.text import listed
from megatron_moe.precision.quantized_tensor import apply_scales

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
_WEIGHT = "weight"
_SCALES = ("weight_scale_inv", "scale")
"""Suffixes that replace `_WEIGHT` in the name of the scales of a quantised matrix: DeepSeek-V3's and DeepSeek-V4's."""
_FP8 = "F8_E4M3"
_E4M3_NAMES = ("e4m3", "float8_e4m3fn")
"""Names of this format in config.json: DeepSeek's and MiniMax's."""
_FP4 = "I8"
"""Safetensors dtype of two packed E2M1 elements, the first one in the low bits."""
_FP4_BLOCK = (1, 32)
"""Elements (rows, columns) that share a scale in the FP4 format of DeepSeek-V4: MXFP4 of the OCP specification."""
_DEQUANTISED = "BF16"

_SAVED_AS: Mapping[str, tuple[tuple[re.Pattern[str], str], ...]] = MappingProxyType(
    {
        "deepseek_v4": (
            (re.compile(r"^model\.embed_tokens\."), "embed."),
            (re.compile(r"^model\.hc_head\.hc_"), "hc_head_"),
            (re.compile(r"^model\."), ""),
            (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
        ),
        "qwen3_5_moe_text": ((re.compile(r"^model\.language_model\."), "model."),),
    }
)
"""Patterns of tensor names in folders, and their replacements in the names of `weight_map`, by `model_type`:
`save_pretrained` of transformers renames tensors of DeepSeek-V4, and Qwen3.5 is published with an image encoder."""
_ALL_EXPERTS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {"qwen3_5_moe_text": re.compile(r"(?P<start>.+\.experts)\.(?P<parts>gate_up|down)_proj")}
)
"""Patterns of the names of tensors that hold the matrices of all experts, first the gates and then the up projections,
where `weight_map` has one name per matrix, by `model_type`."""


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json, without the config of an image encoder. Raises CheckpointProblem if it is missing or invalid,
    or for quantisation other than block-scaled FP8."""
    config = dict(language_model(read_json(folder / CONFIG)))
    quantised = config.get("quantization_config")
    if quantised and fp8_block(config) is None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointProblem(
            f"{folder} holds weights quantised by {method}; convert them to bf16 first. "
            f"Only fp8 (e4m3) with a 2-d weight_block_size is supported."
        )
    return config


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Block size (rows, columns) of block-scaled FP8 weights; None if the weights are not stored in this format."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict) or quantised.get("quant_method") != "fp8":
        return None
    if quantised.get("fmt", "e4m3") not in _E4M3_NAMES:
        return None
    match quantised.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


class _TensorPlace(NamedTuple):
    """Place of a tensor: a file, a name in it and, for a matrix of one expert, the expert and the rows of its slice."""

    path: Path
    file: Any
    name: str
    expert: int | None = None
    rows: slice = slice(None)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.name).get_shape())
        return shape if self.expert is None else (len(range(*self.rows.indices(shape[1]))), *shape[2:])

    def of_experts(self, name: str, parts: str) -> "dict[str, _TensorPlace]":
        """Locations of the matrices of all experts, by name; `name` is the name before the number of an expert."""
        num_experts, num_rows, *_ = self.shape
        kinds = parts.split("_")
        ends = [num_rows * number // len(kinds) for number in range(len(kinds) + 1)]
        return {
            f"{name}.{expert}.{kind}_proj.{_WEIGHT}": self._replace(expert=expert, rows=slice(start, end))
            for expert in range(num_experts)
            for kind, start, end in zip(kinds, ends, ends[1:], strict=False)
        }


class HFFolder:
    """Tensors of a Hugging Face folder, read by name on demand.

    Args:
        config: result of `read_config`.
        stack: exit stack that closes the files.
    Raises:
        CheckpointProblem: a file is missing or damaged, a tensor is in two files, or scales do not match.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], stack: ExitStack) -> None:
        self._folder = folder
        self._stored: dict[str, _TensorPlace] = {}
        model_type = config.get("model_type", "")
        renamed, all_experts = _SAVED_AS.get(model_type, ()), _ALL_EXPERTS.get(model_type)
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointProblem(f"{path} cannot be read ({error}); download it again.") from error
            stored: dict[str, _TensorPlace] = {}
            for name in handle.keys():
                location, published = _TensorPlace(path, handle, name), _published_name(name, renamed)
                match = all_experts.fullmatch(published) if all_experts and len(location.shape) == 3 else None
                stored |= location.of_experts(match["start"], match["parts"]) if match else {published: location}
            duplicates = sorted(stored.keys() & self._stored.keys())
            if duplicates:
                raise CheckpointProblem(f"{path} holds tensors that are also in another file:\n  {listed(duplicates)}")
            self._stored |= stored
        self._block = fp8_block(config)
        self._scaled = self._scale_names()
        """Maps the name of each quantised matrix to the name of its scales."""
        self.names = frozenset(self._stored) - {*self._scaled.values()}
        """Names of all tensors except scales of quantised matrices."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor that `tensor(name)` returns."""
        shape = self._stored[name].shape
        if name in self._scaled and self._stored_dtype(name) == _FP4:
            return (*shape[:-1], 2 * shape[-1])
        return shape

    def dtype(self, name: str) -> str:
        """Safetensors dtype name of the tensor that `tensor(name)` returns."""
        return _DEQUANTISED if name in self._scaled else self._stored_dtype(name)

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor into host memory; quantised weights are dequantised to bf16."""
        weight = self._read(name)
        if name not in self._scaled:
            return weight
        scale = self._read(self._scaled[name]).float()
        if weight.dtype == torch.int8:
            return apply_scales(weight.view(torch.uint8), scale.mT, _FP4_BLOCK).bfloat16()
        assert self._block is not None, f"{name} has scales, but the config names no block size"
        return apply_scales(weight, scale, self._block).bfloat16()

    def _read(self, name: str) -> Tensor:
        # A new memory map, released with the tensor: the pages of a long-lived map would accumulate.
        path, _, stored, expert, rows = self._stored[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored) if expert is None else file.get_slice(stored)[expert, rows]
        return tensor

    def _stored_dtype(self, name: str) -> str:
        _, file, stored, *_ = self._stored[name]
        return str(file.get_slice(stored).get_dtype())

    def _scale_names(self) -> dict[str, str]:
        """Name of the scales of every quantised matrix. Raises CheckpointProblem if scales are missing or have the
        wrong shape."""
        if self._block is None:
            return {}
        found, problems = {}, []
        for name in self._stored:
            match self._stored_dtype(name):
                case dtype if dtype == _FP8:
                    kind, block, per_byte = "FP8", self._block, 1
                case dtype if dtype == _FP4:
                    kind, block, per_byte = "FP4", _FP4_BLOCK, 2
                case _:
                    continue
            shape = list(self._stored[name].shape)
            shape[-1:] = [size * per_byte for size in shape[-1:]]
            wanted = [-(-size // length) for size, length in zip(shape, block, strict=False)]
            names = [name.removesuffix(_WEIGHT) + suffix for suffix in _SCALES]
            scales = next((each for each in names if each in self._stored), None)
            if len(shape) != 2 or scales is None:
                problems.append(f"{name} {shape} is {kind}, but {' or '.join(names)} is missing")
            elif list(held := self._stored[scales].shape) != wanted:
                problems.append(f"{scales} is {list(held)}, blocks of {name} {shape} are {wanted}")
            else:
                found[name] = scales
        if problems:
            raise CheckpointProblem(
                f"{self._folder}: {len(problems)} quantised matrices do not match their scales (FP8 in blocks of "
                f"{self._block[0]} x {self._block[1]}, FP4 in blocks of {_FP4_BLOCK[0]} x {_FP4_BLOCK[1]}); "
                "download the folder again:\n"
                f"  {listed(problems)}"
            )
        return found


def _published_name(name: str, renamed: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in renamed:
        name = pattern.sub(replacement, name)
    return name


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointProblem if the file is missing or invalid."""
    try:
        content = json.loads(read_bounded(path, MAX_HEADER_BYTES))
    except FileNotFoundError as error:
        raise CheckpointProblem(f"{path} does not exist; give a local folder as written by save_pretrained.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointProblem(f"{path} cannot be read ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointProblem(
            f"{path} holds a {type(content).__name__} where an object is expected; download it again."
        )
    return content


def weights_dtype(folder: Path, config: Mapping[str, Any]) -> str:
    """Safetensors dtype name of the embedding weight. Raises CheckpointProblem if it is missing."""
    with ExitStack() as stack:
        source = HFFolder(folder, config, stack)
        embedding = f"{names_of(config.get('model_type', '')).embedding}.weight"
        if embedding not in source.names:
            raise CheckpointProblem(f"{folder}: missing: {embedding}; download the folder again.")
        return source.dtype(embedding)


def _weight_files(folder: Path) -> list[Path]:
    """Paths of the weight files listed in the index, or of the single file."""
    if (folder / INDEX).is_file():
        weight_files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_files, dict) or not all(isinstance(name, str) for name in weight_files.values()):
            raise CheckpointProblem(f"{folder / INDEX} has no weight_map of file names; download it again.")
        files = sorted(set(weight_files.values()))
        absent = [name for name in files if Path(name).name != name or not (folder / name).is_file()]
        if absent or not files:
            named = ", ".join(absent) or "no files"
            raise CheckpointProblem(f"{folder / INDEX} lists {named}, not found in the folder; download it again.")
        return [folder / name for name in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")):
        raise CheckpointProblem(
            f"{folder} has only pickled .bin weights, which are not read for safety; convert them to safetensors."
        )
    raise CheckpointProblem(f"{folder} has neither {SINGLE} nor {INDEX}; download the folder again.")
