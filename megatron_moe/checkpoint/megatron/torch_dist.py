"""Reads files of torch.distributed.checkpoint (DCP), whose metadata is pickled, and the `torch_dist` checkpoints that
Megatron writes with it."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.pickles import (
    MAX_PICKLE_BYTES,
    LazyTensor,
    PickledObject,
    load_archive,
    load_pickle,
)
from megatron_moe.checkpoint.storage import open_regular, read_bounded
from megatron_moe.checkpoint.tensor_shards import block_slices, intersection
from megatron_moe.config.exit_codes import CheckpointProblem


@dataclass(frozen=True)
class StoredChunk:
    """Byte range in a checkpoint file that contains one box (n-d slice) of a tensor, or one pickled object."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of a global tensor, and the stored chunks that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class DCPFiles:
    """Reads a folder with DCP files. Raises CheckpointProblem if it is malformed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self.objects = self._entries()
        """Stored tensors, and locations of pickled objects, by name."""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads a box of a global tensor: `shape` elements from the index `offset` in each dim."""
        entry = self.tensors[name]
        out = torch.empty(shape, dtype=entry.dtype)
        filled = 0
        for chunk in entry.chunks:
            found = intersection(offset, shape, chunk.offset, chunk.shape)
            if found is not None:
                part = out[block_slices(found, offset)]
                part.copy_(self._chunk(name, entry, chunk)[block_slices(found, chunk.offset)])
                filled += part.numel()
        if filled != out.numel():
            raise CheckpointProblem(f"{self.folder}: {name} has only {filled} of {out.numel()} elements")
        return out

    def _chunk(self, name: str, entry: StoredTensor, chunk: StoredChunk) -> Tensor:
        stored = load_archive(self._stored(chunk), f"{self.folder / chunk.file}, {name}")
        if not isinstance(stored, LazyTensor) or (stored.dtype, stored.shape) != (entry.dtype, chunk.shape):
            raise CheckpointProblem(
                f"{self.folder / chunk.file}: {name} is {stored}, .metadata says {entry.dtype} {chunk.shape}"
            )
        return stored.load()

    def _stored(self, chunk: StoredChunk) -> bytes:
        path = self.folder / chunk.file
        with open_regular(path) as file:
            if not 0 <= chunk.start <= chunk.start + chunk.size <= os.fstat(file.fileno()).st_size:
                raise CheckpointProblem(
                    f"{path} is too short for {chunk.size} bytes at byte {chunk.start} (.metadata); copy it again"
                )
            file.seek(chunk.start)
            return file.read(chunk.size)

    def read_object(self, name: str) -> Any:
        """Unpickles the entry `name` of `objects` with an allow-list of classes (`pickles.py`)."""
        stored = self.objects[name]
        return load_archive(self._stored(stored), f"{self.folder / stored.file}, {name}")

    def _entries(self) -> tuple[dict[str, StoredTensor], dict[str, StoredChunk]]:
        """Reads .metadata. Returns the tensors and the locations of all other objects, by name."""
        metadata = load_pickle(self._bytes(".metadata"), f"{self.folder}/.metadata")
        try:
            locations = {
                (index.fqn, tuple(getattr(index, "offset", None) or ())): info
                for index, info in metadata.storage_data.items()
            }
            described = {
                str(name): item
                for name, item in metadata.state_dict_metadata.items()
                if isinstance(item, PickledObject) and hasattr(item, "chunks")
            }
            entries = {name: self._entry(name, item, locations) for name, item in described.items()}
            objects = {
                name: StoredChunk((), (), self._known_file(info, name), int(info.offset), int(info.length))
                for (name, _), info in locations.items()
                if name not in entries
            }
            return entries, objects
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointProblem(f"{self.folder}/.metadata is malformed: {error!r}") from error

    def _entry(self, name: str, item: PickledObject, locations: dict[tuple[str, tuple[int, ...]], Any]) -> StoredTensor:
        shape = tuple(map(int, item.size))
        chunks = []
        for chunk in item.chunks:
            offset, info = tuple(map(int, chunk.offsets)), locations[name, tuple(chunk.offsets)]
            file = self._known_file(info, name)
            size = tuple(map(int, chunk.sizes))
            if any(o < 0 or o + n > s for o, n, s in zip(offset, size, shape, strict=True)):
                raise CheckpointProblem(f"{self.folder}: {name} of shape {shape} has a chunk {offset} + {size}")
            chunks.append(StoredChunk(offset, size, file, int(info.offset), int(info.length)))
        dtype = item.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise CheckpointProblem(f"{self.folder}: {name} has no dtype in .metadata")
        return StoredTensor(dtype, shape, tuple(chunks))

    def _known_file(self, info: PickledObject, name: str) -> str:
        """Name of the file that holds the tensor or object `name`. Raises CheckpointProblem if the file is missing."""
        if info.relative_path not in self._files:
            raise CheckpointProblem(f"{self.folder}: {name} is stored in {info.relative_path!r}, which is missing")
        return str(info.relative_path)

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(path.name for path in self.folder.iterdir() if path.is_file())

    def _bytes(self, name: str) -> bytes:
        try:
            return read_bounded(self.folder / name, MAX_PICKLE_BYTES)
        except OSError as error:
            raise CheckpointProblem(f"{self.folder / name} cannot be read: {error.strerror}") from error


class TorchDist(DCPFiles):
    """Reads a checkpoint folder `iter_NNNNNNN` in torch_dist format. Raises CheckpointProblem if it is malformed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            kind = json.loads(self._bytes("metadata.json"))
        except (ValueError, RecursionError) as error:
            raise CheckpointProblem(f"{folder / 'metadata.json'} is not JSON ({error}); copy it again") from error
        backend = kind.get("sharded_backend") if isinstance(kind, dict) else kind
        if backend != "torch_dist":
            raise CheckpointProblem(
                f"{folder}: metadata.json names the backend {backend!r:.80}, but only torch_dist can be read; convert "
                "it with Megatron's --ckpt-convert-format torch_dist"
            )
        super().__init__(folder)
        self.common = self._common()

    def _common(self) -> dict[str, Any]:
        """Reads args, iteration etc. from common.pt or, since Megatron-Core 0.17, from a pickled object."""
        stored = next((name for name in self.objects if name.startswith("common_state/")), None)
        if (self.folder / "common.pt").is_file() or stored is None:
            content = load_archive(self.folder / "common.pt", f"{self.folder}/common.pt")
        else:
            content = self.read_object(stored)
            content = content[0] if isinstance(content, list) and content else content
        if not isinstance(content, dict):
            raise CheckpointProblem(f"{self.folder}: the common state is not a dict")
        return content
