"""What is in a checkpoint, tensor by tensor, and how two of them differ. Bounded memory; what is read is verified."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_moe.checkpoint.load import read_manifest
from megatron_moe.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    NewerFormat,
    TensorEntry,
    TensorPiece,
)
from megatron_moe.checkpoint.tensor_shards import (
    TORCH_DTYPES,
    FileReader,
    SavedTensor,
    TensorBox,
    fill,
)
from megatron_moe.config.exit_codes import CheckpointProblem

_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Statistics:
    """Of the elements of one tensor, in fp64."""

    norm: float
    """Euclidean."""
    largest: float
    """Magnitude; of the finite elements."""
    num_nonfinite: int
    num_elements: int

    @property
    def rms(self) -> float:
        return self.norm / math.sqrt(self.num_elements) if self.num_elements else 0.0


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two checkpoints."""

    key: str
    what: str
    """missing here, missing there, shape, type; or "values"."""
    largest: float = 0.0
    """Magnitude of the largest difference."""
    relative: float = 0.0
    """Norm of the difference over the norm of the first."""


class OpenCheckpoint:
    """One checkpoint, read piece by piece.

    Raises CheckpointProblem when its manifest cannot be read or a file is not as long as it should be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest: Manifest = read_manifest(path)
            self._reader = FileReader(path, self.manifest.files)
            self._reader.check_sizes()
        except (CorruptCheckpoint, NewerFormat) as problem:
            raise CheckpointProblem(f"checkpoint {path}: {problem}") from problem

    def text(self, name: str) -> str | None:
        """A text of the checkpoint, such as run.yaml."""
        if name not in self.manifest.files:
            return None
        try:
            return self._reader.head(name).decode()
        except CorruptCheckpoint as problem:
            raise CheckpointProblem(f"checkpoint {self.path}: {problem}") from problem

    def statistics(self, key: str) -> Statistics:
        """Raises CheckpointProblem when a piece is damaged."""
        entry = self.manifest.tensors[key]
        squares, largest, nonfinite = 0.0, 0.0, 0
        for piece in entry.pieces:
            for chunk in _chunks(self._verified(key, entry, piece)):
                finite = chunk.isfinite()
                num_bad = chunk.numel() - int(finite.sum())
                values = chunk[finite] if num_bad else chunk
                nonfinite += num_bad
                if values.numel():
                    squares += float(values.square().sum())
                    largest = max(largest, float(values.abs().max()))
        return Statistics(math.sqrt(squares), largest, nonfinite, math.prod(entry.shape))

    def difference(self, key: str, other: "OpenCheckpoint") -> Difference | None:
        """Of a tensor that may be cut into other pieces there; None when all elements are equal, nan to nan."""
        mine, theirs = self.manifest.tensors.get(key), other.manifest.tensors.get(key)
        if mine is None or theirs is None:
            return Difference(key, f"missing in {self.path if mine is None else other.path}")
        if mine.shape != theirs.shape:
            return Difference(key, f"shape {list(mine.shape)} and {list(theirs.shape)}")
        if mine.dtype != theirs.dtype:
            return Difference(key, f"type {mine.dtype} and {theirs.dtype}")
        largest, squares, base, equal = 0.0, 0.0, 0.0, True
        for piece in mine.pieces:
            here, there = self._verified(key, mine, piece), other._block(key, theirs, piece)
            for a, b in zip(_chunks(here), _chunks(there), strict=True):
                same = (a == b) | (a.isnan() & b.isnan())
                equal = equal and bool(same.all())
                apart = torch.where(same, 0.0, (a - b).abs())
                largest = max(largest, float(apart.max())) if apart.numel() else largest
                squares, base = squares + float(apart.square().sum()), base + float(a.square().sum())
        if equal:
            return None
        return Difference(key, "values", largest, math.sqrt(squares / base) if base else math.inf)

    def _verified(self, key: str, entry: TensorEntry, piece: TensorPiece) -> Tensor:
        try:
            self._reader.check(piece.file, piece.start, entry.num_bytes(piece), piece.crc32, key)
        except CorruptCheckpoint as problem:
            raise CheckpointProblem(f"checkpoint {self.path}: {problem}") from problem
        return self._reader.mapped(entry, piece)

    def _block(self, key: str, entry: TensorEntry, of: TensorPiece) -> Tensor:
        """The elements that a piece of another checkpoint has, from the pieces of this one."""
        same = next((p for p in entry.pieces if (p.offset, p.shape) == (of.offset, of.shape)), None)
        if same is not None:
            return self._verified(key, entry, same)
        data = torch.empty(of.shape, dtype=TORCH_DTYPES[entry.dtype])
        target = SavedTensor(entry.shape, (TensorBox(of.offset, data),))
        fill(target, entry, lambda piece, place: self._verified(key, entry, piece))
        return data


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in fp64, some million at a time."""
    for chunk in tensor.reshape(-1).split(_CHUNK_ELEMENTS):
        yield chunk.double()
