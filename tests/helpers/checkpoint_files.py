"""Storage that fails at selected operations, and small checkpoints."""

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.load import CheckpointSource, LoadedCheckpoint, find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.manifest import MANIFEST, TORCH_DTYPES, FileEntry, checksum, decode, encode
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import TensorShard, fill_shard, tensor_key
from megatron_moe.checkpoint.verify import open_verified, verify_checkpoint
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState


class Killed(BaseException):
    """Raised where a process is killed in the simulation."""


class FaultyStorage(Storage):
    """Storage that can be interrupted before every operation and inside every write, and that counts these points.

    Args:
        kill_at: number of the interruption point at which `Killed` is raised.
        fail: called at every point with its number, operation and path; returns the OSError to raise, or None.
    """

    def __init__(
        self, *, kill_at: int | None = None, fail: Callable[[int, str, Path], OSError | None] = lambda n, op, path: None
    ) -> None:
        self.moments: list[str] = []
        self._kill_at = kill_at
        self._fail = fail

    def make_dir(self, path: Path) -> None:
        self._moment("make_dir", path)
        super().make_dir(path)

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self._moment("create", path)
        with open(path, "xb", buffering=0) as file:
            for chunk in chunks:
                file.write(chunk[: len(chunk) // 2])
                self._moment("write", path)
                file.write(chunk[len(chunk) // 2 :])
        self._moment("sync", path)

    def rename(self, source: Path, target: Path) -> None:
        self._moment("rename", target)
        super().rename(source, target)

    def sync_dir(self, path: Path) -> None:
        self._moment("sync_dir", path)

    def remove(self, path: Path) -> None:
        self._moment("remove", path)
        for file in sorted(path.iterdir()) if path.is_dir() else []:
            file.unlink()
            self._moment("remove", file)
        super().remove(path)

    def _moment(self, operation: str, path: Path) -> None:
        number = len(self.moments)
        self.moments.append(f"{operation} {path.name}")
        if number == self._kill_at:
            raise Killed(self.moments[-1])
        error = self._fail(number, operation, path)
        if error is not None:
            raise error


def disk_full(number: int, operation: str, path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def some_tensors(iteration: int) -> dict[str, Tensor]:
    """Tensors of several dtypes and shapes whose values depend on the iteration."""
    source = torch.Generator().manual_seed(iteration)
    weight = torch.randn(6, 5, generator=source)
    return {
        tensor_key("model", "embedding.weight"): weight.bfloat16(),
        tensor_key("model", "decoder.layers.0.mlp.experts.linear_fc1.weight"): torch.randn(3, 4, 2, generator=source),
        tensor_key("model", "decoder.layers.0.mlp.router.expert_bias"): torch.randn(3, generator=source),
        tensor_key("master", "embedding.weight"): weight,
        tensor_key("exp_avg", "embedding.weight"): torch.randn(6, 5, generator=source).double(),
        tensor_key("optimizer", "step_count"): torch.tensor(iteration),
        tensor_key("optimizer", "nothing"): torch.zeros(0, 3),
    }


def whole(tensors: dict[str, Tensor]) -> dict[str, TensorShard]:
    return {key: TensorShard.whole(tensor) for key, tensor in tensors.items()}


def stored_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a verified checkpoint, assembled from their pieces."""
    reader, tensors = open_verified(path), {}
    for key, entry in reader.manifest.tensors.items():
        tensors[key] = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        fill_shard(TensorShard.whole(tensors[key]), entry, partial(reader.read_piece, key))
    return tensors


def blank() -> dict[str, Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in some_tensors(0).items()}


def save_some(saver: CheckpointSaver, iteration: int) -> Path | None:
    return saver.save(iteration, whole(some_tensors(iteration)), some_state(iteration), texts={"run.yaml": "a: 1\n"})


def some_state(iteration: int) -> dict[str, Any]:
    """Valid content of train_state.json."""
    state = TrainState(iteration=iteration, consumed_samples=8 * iteration, consumed_tokens=64 * iteration)
    return {"state": asdict(state), "seed": 1, "data_seed": 1, "seq_length": 8, "global_batch_size": 8}


def rewrite_text(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a text file of a checkpoint and updates the manifest, so that all checksums are correct."""
    (checkpoint / name).write_bytes(content)
    manifest = decode((checkpoint / MANIFEST).read_bytes())
    entry = FileEntry(len(content), len(content), checksum(content))
    (checkpoint / MANIFEST).write_bytes(encode(replace(manifest, files={**manifest.files, name: entry})))


def saved_folder(folder: Path, *iterations: int, **settings: Any) -> Path:
    """Creates a save folder with checkpoints of these iterations."""
    saver = CheckpointSaver(folder, ParallelContext.single(), say=lambda line: None, **settings)
    for iteration in iterations:
        assert save_some(saver, iteration) is not None
    saver.close()
    return folder


def load_some(folder: Path, said: list[str] | None = None, **config: Any) -> tuple[LoadedCheckpoint, dict[str, Tensor]]:
    """Loads into blank tensors from the run's save folder."""
    said = [] if said is None else said
    context, tensors = ParallelContext.single(), blank()
    source = find_checkpoint(CheckpointConfig(save=folder, **config), context, say=said.append)
    assert isinstance(source, CheckpointSource), f"nothing to load in {folder}"
    return load_checkpoint(source, whole(tensors), context, say=said.append), tensors


def flip_bit(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def verify(path: Path) -> list[str]:
    """Lists all problems of a checkpoint; empty if every byte verifies."""
    return list(verify_checkpoint(path).problems)
