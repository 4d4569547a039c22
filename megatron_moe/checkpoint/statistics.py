"""Statistics of the tensors of a checkpoint and differences between two checkpoints, in bounded memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_moe.checkpoint.manifest import TORCH_DTYPES, CorruptCheckpoint, FormatTooNewError, TensorPiece
from megatron_moe.checkpoint.tensor_shards import CheckpointReader, TensorBox, TensorShard, fill_shard, float64_chunks
from megatron_moe.config.exit_codes import CheckpointProblem


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor, computed in fp64 over its finite elements."""

    norm: float
    """L2 norm."""
    largest: float
    """Largest absolute value."""
    num_nonfinite: int
    num_elements: int

    @property
    def rms(self) -> float:
        return self.norm / math.sqrt(self.num_elements) if self.num_elements else 0.0


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between two checkpoints."""

    key: str
    kind: str
    """"values" if only values differ; otherwise a text, e.g. "missing in PATH" or "shape [2, 4] and [4, 2]"."""
    largest: float = 0.0
    """Largest absolute difference between two elements."""
    relative: float = 0.0
    """L2 norm of the difference, divided by the L2 norm of the tensor in the first checkpoint."""


class OpenCheckpoint:
    """Read access to one checkpoint. Tensors are read piece by piece, and every piece is verified.

    Raises CheckpointProblem if the manifest cannot be read or a file does not have the size listed in the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reporting():
            self._reader = CheckpointReader(path)
            self._reader.check_sizes()
        self.manifest = self._reader.manifest

    def text(self, name: str) -> str | None:
        """Content of a text file of the checkpoint, such as run.yaml. None if the checkpoint has no such file."""
        if name not in self.manifest.files:
            return None
        with self._reporting():
            return self._reader.read_head(name).decode()

    def statistics(self, key: str) -> Statistics:
        """Computes the statistics of a tensor. Raises CheckpointProblem if a piece is damaged."""
        entry = self.manifest.tensors[key]
        squares, largest, num_nonfinite = 0.0, 0.0, 0
        for piece in entry.pieces:
            for chunk in float64_chunks(self._read(key, piece)):
                values = chunk[chunk.isfinite()]
                num_nonfinite += chunk.numel() - values.numel()
                if values.numel():
                    squares += float(values.square().sum())
                    largest = max(largest, float(values.abs().max()))
        return Statistics(math.sqrt(squares), largest, num_nonfinite, math.prod(entry.shape))

    def difference(self, key: str, other: "OpenCheckpoint") -> TensorDifference | None:
        """Compares tensor `key` of two checkpoints of any sharding. Returns None if both are equal (NaN equals NaN)."""
        a, b = self.manifest.tensors.get(key), other.manifest.tensors.get(key)
        if a is None or b is None:
            return TensorDifference(key, f"missing in {self.path if a is None else other.path}")
        if a.shape != b.shape:
            return TensorDifference(key, f"shape {list(a.shape)} and {list(b.shape)}")
        if a.dtype != b.dtype:
            return TensorDifference(key, f"type {a.dtype} and {b.dtype}")
        largest, squares, base, equal = 0.0, 0.0, 0.0, True
        for piece in a.pieces:
            values, other_values = self._read(key, piece), other._read_box(key, piece)
            for x, y in zip(float64_chunks(values), float64_chunks(other_values), strict=True):
                same = (x == y) | (x.isnan() & y.isnan())
                equal = equal and bool(same.all())
                error = torch.where(same, 0.0, (x - y).abs())
                worst = float(error.max()) if error.numel() else 0.0
                largest = worst if worst > largest or math.isnan(worst) else largest
                squares, base = squares + float(error.square().sum()), base + float(x.square().sum())
        if equal:
            return None
        return TensorDifference(key, "values", largest, math.sqrt(squares / base) if base else math.inf)

    def _read(self, key: str, piece: TensorPiece) -> Tensor:
        with self._reporting():
            self._reader.verify_piece(key, piece)
        return self._reader.mmap_piece(key, piece)

    def _read_box(self, key: str, box: TensorPiece) -> Tensor:
        """Reads a box of a tensor. The box may overlap several stored pieces."""
        entry = self.manifest.tensors[key]
        same = next((p for p in entry.pieces if (p.offset, p.shape) == (box.offset, box.shape)), None)
        if same is not None:
            return self._read(key, same)
        data = torch.empty(box.shape, dtype=TORCH_DTYPES[entry.dtype])
        fill_shard(
            TensorShard(entry.shape, (TensorBox(box.offset, data),)), entry, lambda piece, _: self._read(key, piece)
        )
        return data

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Context manager that converts CorruptCheckpoint and FormatTooNewError errors to CheckpointProblem."""
        try:
            yield
        except (CorruptCheckpoint, FormatTooNewError) as problem:
            raise CheckpointProblem(f"checkpoint {self.path}: {problem}") from problem
